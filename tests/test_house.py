"""The laws of the house, read off the source: floors, boundaries, names, sizes, mirrors.

Each law is a function from a `House` (a parsed tree) to a list of violations, one line each, with
file and line. The first half of the tests holds the package to the laws; the second half feeds each
law a small tree that breaks it, so that no law can pass by seeing nothing.

Every import counts, also one inside a function, under `TYPE_CHECKING`, or spelled
`importlib.import_module("name")`. Which modules load torch, real processes tell.
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "impala_async"

GROUND, ROOMS, MIDDLE, WORKSHOP, PROCESSES, UPPER_PROCESSES, ROOF = range(7)
FLOORS = {
    # The package's own __init__ stands on the ground too.
    **dict.fromkeys(["__init__", "errors", "config", "schema", "trajectory", "weights"], GROUND),
    **dict.fromkeys(["processes", "output", "user_code", "files"], GROUND),
    **dict.fromkeys(["metrics", "wire", "envs", "algo", "models"], ROOMS),
    **dict.fromkeys(["policy", "runs"], MIDDLE),
    "training": WORKSHOP,
    **dict.fromkeys(["actor", "learner", "launch", "evaluation"], PROCESSES),
    # It starts a learner as `launch` does, and speaks to it as an actor does.
    "replay": UPPER_PROCESSES,
    # It starts runs as `launch` does, and reads their checkpoints as `training` writes them.
    "library": UPPER_PROCESSES,
}
# Root modules that anybody may run, and what these share.
DOORS = {"__main__", "doors", "train", "actors", "replay", "evaluate", "export"}
GROUND_LIBRARIES = {"numpy", "pydantic"}

# Held torch-free: whole rooms and single modules. The doors join them, for the sake of --help.
TORCH_FREE = (
    *("__init__", "errors", "config", "runs"),
    *("schema", "trajectory", "weights"),
    *("processes", "output", "files"),
    *("wire", "envs", "launch"),
    *("learner.recorder", "learner.loop.server", "learner.loop.reporter"),
    *("actor.address", "actor.env_worker"),
    *("replay.index", "library.run"),
)

# Names that only these files may use: dotted ones, or those of methods.
BOUNDARIES = [
    ({"zmq"}, {"wire/sockets.py", "wire/connections.py", "wire/keys.py"}),
    (
        {"torch.Stream", "torch.cuda.Stream", "torch.cuda.ExternalStream"},
        {"learner/loader.py"},
    ),
    (
        {
            *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"),
            *("torch.load", "torch.save", "multiprocessing.reduction.ForkingPickler"),
            *("send_pyobj", "recv_pyobj", "allow_pickle"),
        },
        set(),
    ),
    ({"print"}, {"metrics/console.py", "runs/seed_runs.py"}),
]
ASYNCIO_AND_THREADING_FILES = {"learner/handoff.py"}

BANNED_NAMES = {"utils", "helpers", "common"}
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60

# Exceptions, each with its reason. An entry that is no longer needed is a violation itself.
UPWARD_FILES = {  # "room/module.py": reason
    "__init__.py": "the names that a user imports, each loaded when it is asked for",
}
WITHOUT_MIRROR = {}  # "room/module.py": reason
LONG_FILES = {}  # "room/module.py": reason
LONG_FUNCTIONS = {}  # "room/module.py": reason
BROAD_EXCEPT_FILES = {  # "room/module.py": reason. The doors need no entry.
    "envs/faults.py": "environments are closed behind any fault, which is raised again",
    "actor/link.py": "a thread body: what ends the link is raised on the sampler thread",
    "envs/spares.py": "a thread body: what a call raised is raised where it is waited for",
    "learner/meeting.py": "a thread body: what it raised is raised where it is waited for",
    "learner/handoff.py": "the thread-body helper: a thread has no caller to raise to",
    "runs/summary.py": "no fault of matplotlib, or of its files, may fail a run that is over",
}
WHOLE_CONFIG_FILES = {  # "room/module.py": reason. The doors need no entry.
    "config/ranks.py": "a rank has a share of all that is counted for all of them",
    "config/run.py": "it picks the sections that an actor is told",
    "config/warnings.py": "a warning is mostly of keys of several sections",
    "evaluation/evaluator.py": "a learner tells it all settings, and it builds what plays",
    "evaluation/play.py": "it builds the environments and the policy of a run",
    "learner/build.py": "it builds what the run is made of, and checks what lies between sections",
    "learner/loop/server.py": "it builds, and sends the sections that an actor is told",
    "learner/service.py": "it builds what the run is made of",
    "runs/folder.py": "it writes the whole config down, and names a folder after the run",
    "runs/start.py": "it compares the settings of a run with those that are given",
    "runs/summary.py": "a summary is of the whole run",
}
# Where a plain ValueError is raised: nobody of ours may catch it as if it said more.
VALUE_ERROR_FILES = {  # "room/module.py": reason. Rooms below need no entry.
    "files.py": "json hands it on, and what reads the file says which one it is",
    "models/flat.py": "nobody catches it: the layout was agreed on before",
    "wire/recording.py": "a damaged record, told of with its place a few lines above",
}
# pydantic turns it into an error of its own; a formula's is of whoever calls that wrongly.
VALUE_ERROR_ROOMS = {"config", "algo"}


# -------------------- reading the source


class Import(NamedTuple):
    """One imported thing: `from a.b import c` is `a.b.c`."""

    full_name: str
    line: int

    @property
    def library(self):
        return self.full_name.split(".")[0]


@dataclass(frozen=True)
class Module:
    name: str  # impala_async.wire.pulls
    path: str  # wire/pulls.py, relative to the package
    text: str
    tree: ast.Module

    @property
    def is_package(self):
        return self.path.endswith("__init__.py")

    @property
    def is_door(self):
        """A module of the roof, or the `__main__` of a process: something to `python -m`."""
        return self.floor == ROOF or self.path.endswith("__main__.py")

    @property
    def docstring(self):
        return ast.get_docstring(self.tree) or ""

    @property
    def room(self):
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def floor(self):
        return FLOORS.get(self.room, ROOF)

    @cached_property
    def imports(self):
        return list(_imports(self.tree))

    @cached_property
    def functions(self):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    def uses(self):
        """Every import, every `a.b.c` and every call of a name in the code, aliases resolved."""
        names = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {a.asname: a.name for a in node.names if a.asname}
            elif isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        yield from ((each.line, each.full_name) for each in self.imports)
        for node in ast.walk(self.tree):
            found = node.func if isinstance(node, ast.Call) else node
            if isinstance(found, ast.Attribute) or found is not node:
                head, _, rest = ast.unparse(found).partition(".")
                yield node.lineno, f"{names.get(head, head)}.{rest}".rstrip(".")
            elif isinstance(node, ast.keyword) and ast.unparse(node.value) != "False":
                yield node.value.lineno, str(node.arg)


IMPORTING = ("import_module", "__import__")


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(each.name, node.lineno) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{'.' * node.level}{node.module or ''}"
            yield from (Import(f"{base}.{each.name}", node.lineno) for each in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTING):
            names = [str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant)]
            yield from (Import(name, node.lineno) for name in names)


class House:
    """All modules of the package under a root, parsed."""

    def __init__(self, root):
        self.root = root
        self.modules = {}
        package = root / PACKAGE
        for file in sorted(package.rglob("*.py")):
            path = file.relative_to(package)
            parts = [PACKAGE, *path.with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text, str(file))
            self.modules[name] = Module(name, path.as_posix(), text, tree)

    def __iter__(self):
        return iter(self.modules.values())

    def resolve(self, imported):
        """The module of this package that an import means, if it means one."""
        target = imported.full_name
        while target:
            if target in self.modules:
                return self.modules[target]
            target = target.rpartition(".")[0]
        return None


def _is_any_of(dotted, names):
    return any(dotted == name or dotted.startswith(f"{name}.") for name in names)


# -------------------- the laws


class Finding(NamedTuple):
    """A place that breaks a law."""

    module: Module
    line: int
    text: str


@dataclass(frozen=True)
class Law:
    """A sentence, a search for what breaks it, and the files that may, each with its reason."""

    text: str
    find: Callable[["House"], Iterator[Finding]]
    allowed: dict[str, str]

    def __call__(self, house):
        """All that breaks it, and the exceptions that are not needed."""
        found, used = [], set()
        for module, line, text in self.find(house):
            used.add(module.path)
            if module.path not in self.allowed:
                found.append(f"{PACKAGE}/{module.path}:{line}: [{self.text}] {text}")
        return found + [
            f"{path}: [{self.text}] the exception is not needed"
            for path in sorted(self.allowed.keys() - used)
        ]


LAWS = []


def law(text, allowed=None):
    """Make a law of the search below."""

    def make(find):
        LAWS.append(Law(text, find, {} if allowed is None else allowed))
        return LAWS[-1]

    return make


def inner_imports(house):
    for module in house:
        for imported in module.imports:
            if target := house.resolve(imported):
                yield module, target, imported.line


@law("a module imports only lower floors or its own room, and launch, but for its door, only the "
     "ground floor", UPWARD_FILES)  # fmt: skip
def lower_floors(house):
    for module, target, line in inner_imports(house):
        is_above = target.floor > module.floor and not (module.is_door and target.floor == ROOF)
        is_beside = target.floor == module.floor and module.floor not in {GROUND, ROOF}
        is_light = module.room != "launch" or module.is_door or target.floor == GROUND
        if target.room != module.room and (is_above or is_beside or not is_light):
            floors = f"floor {module.floor} imports {target.name} of floor {target.floor}"
            yield Finding(module, line, floors)


@law("every folder and root module has its place in the map of tests/test_house.py")
def known_rooms(house):
    for module in house:
        if module.room not in FLOORS and ("/" in module.path or module.room not in DOORS):
            yield Finding(module, 1, f"nobody knows {module.room}")


@law("the ground floor imports only the standard library, numpy and pydantic")
def ground_libraries(house):
    allowed = sys.stdlib_module_names | GROUND_LIBRARIES | {PACKAGE}
    for module in house:
        for imported in module.imports:
            assert imported.library, f"{module.path}:{imported.line}: a relative import"
            if module.floor == GROUND and imported.library not in allowed:
                yield Finding(module, imported.line, f"imports {imported.full_name}")


def torch_free_modules(house):
    names = {f"{PACKAGE}.{name}" for name in TORCH_FREE}
    return [
        module
        for module in house
        if module.is_door or module.room == "__init__" or _is_any_of(module.name, names)
    ]


@law("zmq, CUDA streams, print, asyncio with threading stay in their files, pickle out of all")
def boundaries(house):
    for module in house:
        lines = {imported.library: imported.line for imported in module.imports}
        is_mixed = {"asyncio", "threading"} <= lines.keys()
        if is_mixed and module.path not in ASYNCIO_AND_THREADING_FILES:
            yield Finding(module, lines["threading"], "imports asyncio and threading")
        for line, name in module.uses():
            for names, files in BOUNDARIES:
                is_used = _is_any_of(name, names) or name.rpartition(".")[2] in names
                is_own = module.path in files or (module.is_door and "print" in names)
                if is_used and not is_own:
                    yield Finding(module, line, f"uses {name}")


@law("each module has its mirror test", WITHOUT_MIRROR)
def mirror_tests(house):
    for module in house:
        path = Path(module.path)
        mirror = Path("tests") / path.parent / f"test_{path.name}"
        is_named = path.stem not in {"__init__", "__main__"}
        if is_named and not (house.root / mirror).is_file():
            yield Finding(module, 1, f"there is no {mirror.as_posix()}")


@law("a file is named after what it holds")
def file_names(house):
    for module in house:
        if BANNED_NAMES & {part.lower() for part in module.name.split(".")}:
            yield Finding(module, 1, f"no {'/'.join(sorted(BANNED_NAMES))} here")


@law(f"a file has at most {MAX_FILE_LINES} lines", LONG_FILES)
def file_sizes(house):
    for module in house:
        if (num_lines := len(module.text.splitlines())) > MAX_FILE_LINES:
            yield Finding(module, MAX_FILE_LINES + 1, f"this one has {num_lines}")


@law(f"a function has at most {MAX_FUNCTION_LINES} lines", LONG_FUNCTIONS)
def function_sizes(house):
    for module in house:
        for node in module.functions:
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield Finding(module, node.lineno, f"{node.name} has {num_lines}")


@law("a module's docstring says what it is, and in actor and learner where it runs")
def docstrings(house):
    for module in house:
        lines = [line.strip() for line in module.docstring.splitlines()]
        is_told = module.is_package or any(line.startswith("Runs on: ") for line in lines)
        if not lines:
            yield Finding(module, 1, "has none")
        elif module.room in {"actor", "learner"} and not is_told:
            yield Finding(module, 1, "its docstring has no line `Runs on: ...`")


@law("broad except only in the thread body, the per-peer handler and the doors", BROAD_EXCEPT_FILES)
def no_broad_except(house):
    for module in house:
        for node in ast.walk(module.tree):
            caught = []
            if isinstance(node, ast.ExceptHandler):
                caught = [node.type or ast.Name("BaseException")]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                caught = node.args
            names = {n.id for each in caught for n in ast.walk(each) if isinstance(n, ast.Name)}
            if names & {"Exception", "BaseException"} and not module.is_door:
                yield Finding(module, node.lineno, ast.unparse(node).partition(":")[0])


@law("a function takes its section, never the whole config, but where all is built",
     WHOLE_CONFIG_FILES)  # fmt: skip
def sections_not_configs(house):
    for module in house:
        for node in [] if module.is_door else module.functions:
            if "RunConfig" in ast.unparse(node.args):
                yield Finding(module, node.lineno, f"{node.name} takes RunConfig")


@law("what we raise on purpose says what it means: no plain ValueError", VALUE_ERROR_FILES)
def no_plain_value_errors(house):
    for module in house:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Raise) and node.exc and module.room not in VALUE_ERROR_ROOMS:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if ast.unparse(raised) == "ValueError":
                    yield Finding(module, node.lineno, "raises ValueError")


OBSCURE = ("Of", "What", "Whoever", "Whatever")
# A sentence begins with its text, a paragraph, an item, a row, or where another one ends.
OPENING = re.compile(rf"(?m)(?:\A|^\s*$|^ *[-*|#]|[.!?:]\W*\s)\W*({'|'.join(OBSCURE)})[\s']")


def obscure_openings(text):
    """The sentences of a text that begin obscurely: the lines before each, and its first word."""
    for found in OPENING.finditer(text):
        yield text.count("\n", 0, found.start(1)), found[1]


def obscure_lines(source):
    """The sentences in strings and comments of a source that begin so: lines and first words."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append((node.lineno, node.value))
    for block in re.finditer(r"(?m)^ *#.*(?:\n *#.*)*|  #.*$", source):
        line = source.count("\n", 0, block.start()) + 1
        texts.append((line, re.sub("(?m)^ *# ?", "", block[0])))
    return [(line + n, word) for line, text in texts for n, word in obscure_openings(text)]


@law("a sentence begins with what it speaks of: not with Of, What, Whoever or Whatever")
def openings(house):
    for module in house:
        for line, word in obscure_lines(module.text):
            yield Finding(module, line, f"begins with {word}")


# -------------------- asking real processes

_PROBE = """
import importlib, json, os, runpy, sys, traceback
# Once for all, as they take long, and none of them brings torch.
import gymnasium.vector, msgpack, numpy, psutil, pydantic, rich.logging, uvloop, zmq.asyncio
assert "torch" not in sys.modules

def run(name, *flags):
    if not flags:
        return importlib.import_module(name) and 0
    sys.argv = [name, *flags]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0

for job in json.loads(sys.argv[1]):
    if os.fork() == 0:
        try:
            code = run(*job)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = "none"
        print(f"\\n@exit={code} torch={'torch' in sys.modules}", flush=True)
        os._exit(0)
    os.wait()
"""


def run_each(root, jobs):
    """How each ends, a module to import or one with flags to run; and all that they say."""
    command = [sys.executable, "-c", _PROBE, json.dumps(jobs)]
    how = {"cwd": root, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    said = subprocess.run(command, timeout=100, check=True, **how).stdout
    return re.findall("(?m)^@(.*)$", said), said


def doors(house):
    """All that `python -m` can start: roof modules with a main guard, and every `__main__`."""
    return [
        module
        for module in house
        if module.is_door
        and (module.path.endswith("__main__.py") or '__name__ == "__main__"' in module.text)
    ]


# -------------------- the package, law by law


@pytest.fixture(scope="module")
def house():
    return House(ROOT)


def keep(violations):
    if violations:
        pytest.fail("\n".join(violations), pytrace=False)


def test_the_walk_sees_the_whole_package(house):
    num_files = sum(1 for _ in (ROOT / PACKAGE).glob("**/*.py"))
    assert len(house.modules) == num_files >= 40
    assert {f"{PACKAGE}", f"{PACKAGE}.config", f"{PACKAGE}.schema"} <= house.modules.keys()
    assert sum(len(module.imports) for module in house) > 2 * num_files


def test_the_package_keeps_every_law(house):
    keep([violation for law in LAWS for violation in law(house)])


def test_tests_and_benchmarks_begin_their_sentences_as_the_package_does():
    paths = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py"), *ROOT.glob("examples/*.py")]
    found = [(path, each) for path in paths for each in obscure_lines(path.read_text("utf-8"))]
    keep([f"{path}:{line}: begins with {word}" for path, (line, word) in found])


def test_a_folder_has_few_modules(house):
    counts = Counter(Path(m.path).parent.as_posix() for m in house if not m.is_package)
    assert max(counts.values()) <= 15, counts


def test_tests_carry_no_annotations():
    """Nobody checks their types. A field of a class needs its own, to be one."""
    found = []
    for path in ROOT.glob("tests/**/*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        bodies = [node.body for node in nodes if isinstance(node, ast.ClassDef)]
        fields = {id(part) for body in bodies for part in body}
        for node in nodes:
            typed = getattr(node, "returns", None) or getattr(node, "annotation", None)
            if typed and id(node) not in fields:
                found.append(f"{path}:{node.lineno}: {ast.unparse(typed)}")
    keep(found)


def test_torch_free_modules_help_and_config_errors_load_no_torch(house):
    free = [m.name for m in torch_free_modules(house) if not m.path.endswith("__main__.py")]
    wrong = ("--set", "no_such_section.key=1")
    jobs = {
        **dict.fromkeys([(name,) for name in free], 0),
        **dict.fromkeys([(door.name, "--help") for door in doors(house)], 0),
        **{(f"{PACKAGE}.{name}", *wrong): 2 for name in ("train", "learner.__main__")},
    }
    ends, said = run_each(ROOT, [*jobs, (f"{PACKAGE}.policy",)])
    free = [f"exit={code} torch=False" for code in jobs.values()]
    assert ends == [*free, "exit=0 torch=True"], said
    # A wheel has no pages.
    assert not re.search(r"docs/|\.md\b", said)


# -------------------- the laws, tried on a fake tree

# Modules of a small house, without their docstrings, which are all the same.
DOC = '"""A module.\n\nRuns on: learner thread\n"""\n'
CLEAN = {
    "__init__.py": "",
    "errors.py": "import numpy as np",
    "config/__init__.py": "",
    "config/run.py": "from impala_async.errors import np",
    "wire/__init__.py": "",
    "wire/pulls.py": "from impala_async.config import run",
    "wire/sockets.py": "import zmq",
    "training/__init__.py": "",
    "training/step.py": "import torch",
    "learner/__init__.py": "",
    "learner/loop/__init__.py": "",
    "learner/loop/server.py": (
        "import asyncio\nfrom impala_async.wire import sockets\n"
        "def late():\n    from impala_async.training.step import torch"
    ),
    "learner/handoff.py": "import asyncio\nimport threading",
    "learner/__main__.py": "from impala_async import train\nprint(train)",
    "launch/__init__.py": "",
    "launch/__main__.py": "from impala_async import train",
    "train.py": "try:\n    import impala_async.wire.pulls\nexcept Exception:\n    raise",
}

# law, the file that breaks it, its source after a docstring on line 1 (None: without one), the
# line to be named
BROKEN = [
    (lower_floors, "wire/pulls.py", "def f():\n    import impala_async.learner.loop.server", 3),
    (lower_floors, "wire/pulls.py", "x = 1\n__import__('impala_async.train')", 3),
    (lower_floors, "errors.py", "from impala_async import wire", 2),
    (lower_floors, "actor/client.py", "import impala_async.learner.loop.server as i", 2),
    (known_rooms, "attic/box.py", "", 1),
    (known_rooms, "attic.py", "", 1),
    (ground_libraries, "config/run.py", "import msgpack", 2),
    (lower_floors, "launch/local.py", "from impala_async.wire import pulls", 2),
    (boundaries, "wire/pulls.py", "import os\nfrom zmq import Context", 3),
    (boundaries, "learner/thread.py", "import asyncio\nfrom threading import Thread", 3),
    (boundaries, "training/step.py", "import torch as t\ns = t.cuda.Stream()", 3),
    (boundaries, "wire/pulls.py", "from pickle import loads", 2),
    (boundaries, "training/step.py", "import torch\ntorch.load('x')", 3),
    (boundaries, "wire/sockets.py", "def f(s):\n    return s.recv_pyobj()", 3),
    (boundaries, "schema.py", "import numpy\nnumpy.load('x', allow_pickle=True)", 3),
    (mirror_tests, "wire/messages.py", "", 1),
    (file_names, "wire/utils.py", "", 1),
    (file_sizes, "wire/pulls.py", "x = 1\n" * MAX_FILE_LINES, MAX_FILE_LINES + 1),
    (function_sizes, "wire/pulls.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, 2),
    (docstrings, "learner/slots.py", "x = 'Runs on: event loop'", 1),
    (boundaries, "wire/pulls.py", "print('x')", 2),
    (no_broad_except, "wire/pulls.py", "try:\n    x = 1\nexcept (E, Exception):\n    raise", 4),
    (no_broad_except, "wire/pulls.py", "import contextlib as c\nc.suppress(Exception)", 3),
    (sections_not_configs, "wire/pulls.py", "def f(*, config: RunConfig): ...", 2),
    (sections_not_configs, "wire/pulls.py", "def f(x, y: 'RunConfig | None' = None): ...", 2),
    (no_plain_value_errors, "wire/pulls.py", "def f():\n    raise ValueError from None", 3),
    *((openings, "wire/pulls.py", f"x = 1  # {word} those are, all.", 2) for word in OBSCURE),
    (openings, "wire/pulls.py", f'def f():\n    """It is so.\n\n    {OBSCURE[1]} it is."""', 5),
    (openings, "wire/pulls.py", f"# It is\n# here. (And\n# there.) {OBSCURE[0]} it\n# none.", 4),
    (openings, "wire/pulls.py", f"raise E('it is here. {OBSCURE[1]} it is')", 2),
    (docstrings, "schema.py", None, 1),
]  # fmt: skip


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds a small house that keeps every law without exceptions, changed as the test likes."""
    for law in LAWS:
        for entry in list(law.allowed):
            monkeypatch.delitem(law.allowed, entry)

    def make(**changes):
        files = {f"impala_async/{path}": f"{DOC}{text}\n" for path, text in CLEAN.items()}
        for path in CLEAN:
            files[f"tests/{path.rpartition('/')[0]}/test_{path.rpartition('/')[2]}"] = ""
        for path, text in (files | changes).items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return House(tmp_path)

    return make


def test_a_house_in_order_breaks_no_law_and_needs_no_exception(build):
    house = build()
    assert [violation for law in LAWS for violation in law(house)] == []
    for law in LAWS:
        law.allowed["wire/pulls.py"] = "for this test"
        (stale,) = law(house)
        assert stale.startswith("wire/pulls.py: ")
        del law.allowed["wire/pulls.py"]


@pytest.mark.parametrize(
    ("law", "path", "source", "line"),
    BROKEN,
    ids=[f"{law.find.__name__}-{index}" for index, (law, *_) in enumerate(BROKEN)],
)
def test_a_broken_law_is_seen(build, law, path, source, line):
    text = "x = 1\n" if source is None else f'"""Broken."""\n{source}\n'
    broken = build(**{f"impala_async/{path}": text})
    assert any(found.startswith(f"impala_async/{path}:{line}: ") for found in law(broken))


def test_every_law_has_a_tree_that_breaks_it():
    assert [each for each in LAWS if each not in [law for law, *_ in BROKEN]] == []
