"""The laws of the house, read off the source: floors, boundaries, names, sizes, mirrors.

Each law is a function from a `House` (a parsed tree) to a list of violations, one line each, with
file and line. The first half of the tests holds the package to the laws; the second half feeds each
law a small tree that breaks it, so that no law can pass by seeing nothing.

How imports count: for floors and boundaries every import counts, also one inside a function, under
`TYPE_CHECKING`, or spelled `importlib.import_module("name")`. For torch-freeness only what runs
when the module is imported counts, followed transitively; then a real process tries the same.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "impala_async"

GROUND, ROOMS, LANDING, UPPER_LANDING, WORKSHOP, PROCESSES, UPPER_PROCESSES, ROOF = range(8)
FLOORS = {
    # The package's own __init__ stands on the ground too.
    **dict.fromkeys(["__init__", "errors", "config"], GROUND),
    **dict.fromkeys(
        [
            *("layout", "schema", "trajectory", "weights"),
            *("processes", "interrupts", "user_code", "waiting", "files"),
        ],
        GROUND,
    ),
    **dict.fromkeys(["metrics", "wire", "envs", "algo", "models"], ROOMS),
    **dict.fromkeys(["policy", "runs"], LANDING),
    "team": UPPER_LANDING,
    "training": WORKSHOP,
    **dict.fromkeys(["actor", "learner", "launch"], PROCESSES),
    # It starts a learner as `launch` does, and speaks to it as an actor does.
    "replay": UPPER_PROCESSES,
}
# Root modules that anybody may run, and what these share.
DOORS = {"__main__", "doors", "train", "record", "replay", "evaluate"}
GROUND_LIBRARIES = {"numpy", "pydantic"}
LAUNCH_MAY_IMPORT = {"__init__", "launch", "config", "errors"}
LAUNCH_MAY_IMPORT |= {"processes", "interrupts", "files", "waiting"}

# Held torch-free: whole rooms and single modules. The doors join them, for the sake of --help.
TORCH_FREE = (
    *("__init__", "errors", "config", "runs"),
    *("layout", "schema", "trajectory", "weights"),
    *("processes", "interrupts", "files"),
    *("wire", "envs", "launch"),
    *("learner.loop.ingest", "learner.loop.publisher", "learner.loop.reporter", "actor.env_worker"),
    *("learner.recorder", "learner.loop.server"),
    *("replay.index", "replay.client", "replay.learner"),
)
TORCH = ("torch", "torchvision", "functorch", "tensordict", "safetensors.torch")

ZMQ_FILES = {"wire/sockets.py", "wire/connections.py", "wire/security.py"}
ASYNCIO_AND_THREADING_FILES = {"learner/handoff.py"}
STREAM_FILES = {"learner/threads/loader.py", "training/backprop.py", "training/snapshot.py"}
STREAMS = {"torch.Stream", "torch.cuda.Stream", "torch.cuda.ExternalStream"}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
PICKLING_CALLS = {"torch.load", "torch.save", "multiprocessing.reduction.ForkingPickler"}
PICKLING_METHODS = {"send_pyobj", "recv_pyobj"}

BANNED_NAMES = {"utils", "helpers", "common"}
PRINTING_FILES = {"metrics/sinks/console.py"}
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60

# Exceptions, each with its reason. An entry that is no longer needed is a violation itself.
WITHOUT_MIRROR: dict[str, str] = {}  # "room/module.py": reason
LONG_FILES: dict[str, str] = {}  # "room/module.py": reason
LONG_FUNCTIONS: dict[str, str] = {  # "room/module.py:function": reason
    "algo/losses.py:appo_loss": "a third of it is the signature, which the contract fixes",
}
BROAD_EXCEPT_FILES: dict[str, str] = {  # "room/module.py": reason. The doors need no entry.
    "actor/link.py": "a thread body: what ends the link is raised on the sampler thread",
    "learner/handoff.py": "the thread-body helper: a thread has no caller to raise to",
    "training/backprop.py": "what does not compile or is not recorded is computed as written",
}


# -------------------- reading the source


@dataclass(frozen=True)
class Import:
    """One imported thing: `from a.b import c` is target `a.b`, name `c`."""

    target: str
    name: str | None
    line: int
    is_run_at_import: bool

    @property
    def full_name(self) -> str:
        return f"{self.target}.{self.name}" if self.name else self.target


@dataclass(frozen=True)
class Module:
    name: str  # impala_async.wire.codec
    path: str  # wire/codec.py, relative to the package
    text: str
    tree: ast.Module = field(repr=False)

    def at(self, line: int, law: str, text: str) -> str:
        return f"{PACKAGE}/{self.path}:{line}: [{law}] {text}"

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def is_door(self) -> bool:
        """A module of the roof, or the `__main__` of a process: something to `python -m`."""
        return self.floor == ROOF or self.path.endswith("__main__.py")

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def floor(self) -> int:
        return FLOORS.get(self.room, ROOF)

    @cached_property
    def imports(self) -> list[Import]:
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        reader = _ImportReader(package)
        reader.visit(self.tree)
        return reader.imports

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local name to what it stands for: `import numpy as np` gives np: numpy."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {a.asname: a.name for a in node.names if a.asname}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return names

    def dotted_uses(self) -> Iterator[tuple[int, str]]:
        """Every `a.b.c` in the code, aliases resolved, and every name imported with `from`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                if dotted := self._dotted(node):
                    yield node.lineno, dotted
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (head := self._dotted(node.value)):
            return f"{head}.{node.attr}"
        return None


class _ImportReader(ast.NodeVisitor):
    """Collects imports and knows which of them run when the module itself is imported."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.imports: list[Import] = []
        self._deferred = 0

    def _add(self, target: str, name: str | None, line: int) -> None:
        self.imports.append(Import(target, name, line, is_run_at_import=not self._deferred))

    def _visit_deferred(self, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        self._deferred += 1
        for node in nodes:
            self.visit(node)
        self._deferred -= 1

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, None, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        target = node.module or ""
        if node.level:
            base = self.package.split(".")
            kept = base[: len(base) - node.level + 1]
            target = ".".join([*kept, target] if target else kept)
        for alias in node.names:
            self._add(target, alias.name, node.lineno)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._visit_deferred(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_deferred([node.body])

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            self._visit_deferred(node.body)
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        is_import = ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}
        if is_import and node.args and isinstance(node.args[0], ast.Constant):
            target = str(node.args[0].value)
            level = len(target) - len(target.lstrip("."))
            base = self.package.split(".")
            kept = base[: len(base) - level + 1] if level else []
            self._add(".".join([*kept, target.lstrip(".")]), None, node.lineno)
        self.generic_visit(node)


class House:
    """All modules of the package under a root, parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package_dir = root / PACKAGE
        self.modules: dict[str, Module] = {}
        for file in sorted(self.package_dir.rglob("*.py")):
            path = file.relative_to(self.package_dir)
            parts = [PACKAGE, *path.with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text, str(file))
            self.modules[name] = Module(name, path.as_posix(), text, tree)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    def resolve(self, imported: Import) -> Module | None:
        """The module of this package that an import means, if it means one."""
        target = imported.full_name
        while target:
            if target in self.modules:
                return self.modules[target]
            target = target.rpartition(".")[0]
        return None

    def torch_chain(self, start: Module) -> list[str] | None:
        """How importing a module comes to import torch: its name, the modules between, torch."""
        came_from: dict[str, str | None] = {}
        waiting: list[tuple[str, str | None]] = [(start.name, None)]
        while waiting:
            name, parent = waiting.pop(0)
            if name in came_from:
                continue
            came_from[name] = parent
            # Importing a.b.c runs a and a.b first.
            if (package := name.rpartition(".")[0]) in self.modules:
                waiting.append((package, name))
            for imported in self.modules[name].imports:
                if not imported.is_run_at_import:
                    continue
                if _is_any_of(imported.full_name, TORCH):
                    return [*_path_back(came_from, name), imported.full_name]
                if target := self.resolve(imported):
                    waiting.append((target.name, name))
        return None


def _path_back(came_from: dict[str, str | None], name: str) -> list[str]:
    path = [name]
    while parent := came_from[path[0]]:
        path.insert(0, parent)
    return path


def _is_any_of(dotted: str, names: tuple[str, ...] | set[str]) -> bool:
    return any(dotted == name or dotted.startswith(f"{name}.") for name in names)


def _stale(law: str, allowed: dict[str, str], used: set[str]) -> list[str]:
    unused = sorted(allowed.keys() - used)
    return [f"{name}: [{law}] the allow-list entry is not needed" for name in unused]


# -------------------- the laws


def lower_floors(house: House) -> list[str]:
    law = "a module imports only lower floors or its own room"
    return [
        module.at(line, law, f"{module.room} (floor {module.floor}) imports {target.name}"
                  f" (floor {target.floor})")
        for module, target, line in inner_imports(house)
        if target.floor > module.floor and not (module.is_door and target.floor == ROOF)
    ]  # fmt: skip


def no_doors_between_rooms(house: House) -> list[str]:
    law = "rooms on one floor never import each other"
    return [
        module.at(line, law, f"{module.room} imports {target.name}")
        for module, target, line in inner_imports(house)
        if target.floor == module.floor
        and target.room != module.room
        and module.floor not in {GROUND, ROOF}
    ]


def inner_imports(house: House) -> Iterator[tuple[Module, Module, int]]:
    for module in house:
        for imported in module.imports:
            if target := house.resolve(imported):
                yield module, target, imported.line


def known_rooms(house: House) -> list[str]:
    law = "every folder and root module has its place in the map of tests/test_house.py"
    return [
        module.at(1, law, f"nobody knows {module.room}")
        for module in house
        if module.room not in FLOORS and ("/" in module.path or module.room not in DOORS)
    ]


def ground_libraries(house: House) -> list[str]:
    law = "the ground floor imports only the standard library, numpy and pydantic"
    allowed = sys.stdlib_module_names | GROUND_LIBRARIES | {PACKAGE}
    return [
        module.at(imported.line, law, f"imports {imported.full_name}")
        for module in house
        if module.floor == GROUND
        for imported in module.imports
        if imported.target.split(".")[0] not in allowed
    ]


def launch_is_light(house: House) -> list[str]:
    law = "launch imports config only"
    return [
        module.at(line, law, f"imports {target.name}")
        for module, target, line in inner_imports(house)
        if module.room == "launch" and target.room not in LAUNCH_MAY_IMPORT
    ]


def torch_freeness(house: House) -> list[str]:
    law = "torch-free modules do not import torch, not even transitively"
    return [
        module.at(1, law, " -> ".join(chain))
        for module in torch_free_modules(house)
        if (chain := house.torch_chain(module))
    ]


def torch_free_modules(house: House) -> list[Module]:
    names = {f"{PACKAGE}.{name}" for name in TORCH_FREE}
    return [
        module
        for module in house
        if module.is_door or module.room == "__init__" or _is_any_of(module.name, names)
    ]


def zmq_boundary(house: House) -> list[str]:
    law = f"only {' and '.join(sorted(ZMQ_FILES))} import zmq"
    return [
        module.at(imported.line, law, f"imports {imported.full_name}")
        for module in house
        if module.path not in ZMQ_FILES
        for imported in module.imports
        if imported.target.split(".")[0] == "zmq"
    ]


def asyncio_boundary(house: House) -> list[str]:
    law = "only learner/handoff.py imports both asyncio and threading"
    found = []
    for module in house:
        lines = {imported.target.split(".")[0]: imported.line for imported in module.imports}
        is_mixed = {"asyncio", "threading"} <= lines.keys()
        if is_mixed and module.path not in ASYNCIO_AND_THREADING_FILES:
            found.append(module.at(lines["threading"], law, "imports both"))
    return found


def stream_boundary(house: House) -> list[str]:
    law = f"only {' and '.join(sorted(STREAM_FILES))} own CUDA streams"
    return [
        module.at(line, law, f"mentions {name}")
        for module in house
        if module.path not in STREAM_FILES
        for line, name in module.dotted_uses()
        if name in STREAMS
    ]


def no_pickle(house: House) -> list[str]:
    law = "no pickle, on any path, of any kind"
    found = []
    for module in house:
        for imported in module.imports:
            if imported.target.split(".")[0] in PICKLERS:
                found.append(module.at(imported.line, law, f"imports {imported.full_name}"))
        for line, name in module.dotted_uses():
            if name in PICKLING_CALLS or name.split(".")[-1] in PICKLING_METHODS:
                found.append(module.at(line, law, f"uses {name}"))
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.keyword) or node.arg != "allow_pickle":
                continue
            if ast.unparse(node.value) != "False":
                found.append(module.at(node.value.lineno, law, "allows pickle"))
    return found


def mirror_tests(house: House) -> list[str]:
    law = "each module has its mirror test"
    found, used = [], set()
    for module in house:
        path = Path(module.path)
        if path.stem in {"__init__", "__main__"}:
            continue
        mirror = Path("tests") / path.parent / f"test_{path.name}"
        if (house.root / mirror).is_file():
            continue
        if module.path in WITHOUT_MIRROR:
            used.add(module.path)
        else:
            found.append(module.at(1, law, f"there is no {mirror.as_posix()}"))
    return found + _stale(law, WITHOUT_MIRROR, used)


def file_names(house: House) -> list[str]:
    law = "a file is named after what it holds"
    return [
        module.at(1, law, f"no {'/'.join(sorted(BANNED_NAMES))} here")
        for module in house
        if BANNED_NAMES & {part.lower() for part in module.name.split(".")}
    ]


def file_sizes(house: House) -> list[str]:
    law = f"a file has at most {MAX_FILE_LINES} lines"
    long = {m.path: m for m in house if len(m.text.splitlines()) > MAX_FILE_LINES}
    return [
        module.at(MAX_FILE_LINES + 1, law, f"this one has {len(module.text.splitlines())}")
        for path, module in long.items()
        if path not in LONG_FILES
    ] + _stale(law, LONG_FILES, set(long))


def function_sizes(house: House) -> list[str]:
    law = f"a function has at most {MAX_FUNCTION_LINES} lines"
    found, used = [], set()
    for module in house:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines <= MAX_FUNCTION_LINES:
                continue
            entry = f"{module.path}:{node.name}"
            if entry in LONG_FUNCTIONS:
                used.add(entry)
            else:
                found.append(module.at(node.lineno, law, f"{node.name} has {num_lines}"))
    return found + _stale(law, LONG_FUNCTIONS, used)


def docstrings(house: House) -> list[str]:
    law = "a module's docstring says what it is and what it owns"
    return [module.at(1, law, "has none") for module in house if not _docstring(module)]


def runs_on(house: House) -> list[str]:
    law = "modules of actor and learner say where they run"
    return [
        module.at(1, law, "its docstring has no line `Runs on: ...`")
        for module in house
        if module.room in {"actor", "learner"} and not module.is_package
        if not any(
            line.strip().startswith("Runs on: ") for line in _docstring(module).splitlines()
        )
    ]  # fmt: skip


def _docstring(module: Module) -> str:
    return ast.get_docstring(module.tree) or ""


def no_print(house: House) -> list[str]:
    law = "only the doors and the console sink print"
    return [
        module.at(node.lineno, law, "calls print")
        for module in house
        if not module.is_door and module.path not in PRINTING_FILES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def no_broad_except(house: House) -> list[str]:
    law = "broad except only in the thread body, the per-peer handler and the doors"
    found, used = [], set()
    for module in house:
        if module.is_door:
            continue
        for line, what in _broad_excepts(module.tree):
            if module.path in BROAD_EXCEPT_FILES:
                used.add(module.path)
            else:
                found.append(module.at(line, law, what))
    return found + _stale(law, BROAD_EXCEPT_FILES, used)


def _broad_excepts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node.lineno, "bare except"
            elif _names_broad([node.type]):
                yield node.lineno, f"except {ast.unparse(node.type)}"
        elif isinstance(node, ast.Call):
            is_suppress = ast.unparse(node.func).split(".")[-1] == "suppress"
            if is_suppress and _names_broad(node.args):
                yield node.lineno, ast.unparse(node)


def _names_broad(nodes: list[ast.expr]) -> bool:
    names = {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def the_word_minibatch(house: House) -> list[str]:
    law = "the word minibatch lives only in MinibatchBuffer and PPO's key; a batch is a batch"
    found = []
    for module in house:
        if _says_minibatch(module.path):
            found.append(module.at(1, law, "in the file's name"))
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type == tokenize.NAME and _says_minibatch(token.string):
                found.append(module.at(token.start[0], law, f"in {token.string}"))
    return found


def _says_minibatch(text: str) -> bool:
    plain = text.lower().replace("_", "")
    return "minibatch" in plain.replace("minibatchbuffer", "").replace("numminibatches", "")


# -------------------- asking real processes

_PROBE_IMPORTS = """
import importlib, os, sys
# Once for all, as they take long, and none of them brings torch.
import gymnasium.vector, msgpack, numpy, psutil, pydantic, rich.logging, uvloop, zmq.asyncio
assert "torch" not in sys.modules
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        importlib.import_module(name)
        os._exit(3 if "torch" in sys.modules else 0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        print(f"{name}: imports torch" if code == 3 else f"{name}: cannot be imported")
"""

_PROBE_DOOR = """
import runpy, sys
name, sys.argv = sys.argv[1], sys.argv[1:]
code = 0
try:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = 0 if end.code is None else end.code
print(f"\\nexit={code} torch={'torch' in sys.modules}")
"""


def _ask(root: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)


def imports_of_torch(root: Path, names: list[str]) -> list[str]:
    """Of these modules, those that load torch (or cannot be imported), each tried alone."""
    answer = _ask(root, _PROBE_IMPORTS, *names)
    assert answer.returncode == 0, answer.stderr
    # A module that cannot be imported shows its traceback among the messages.
    return [*answer.stdout.splitlines(), *answer.stderr.splitlines()]


def run_door(root: Path, name: str, *args: str) -> tuple[str, str]:
    """What became of `python -m name args`: `exit=<code> torch=<bool>`, and all it said."""
    answer = _ask(root, _PROBE_DOOR, name, *args)
    lines = answer.stdout.splitlines()
    return (lines[-1] if lines else "died"), answer.stdout + answer.stderr


def doors(house: House) -> list[Module]:
    """What `python -m` can start: roof modules with a main guard, and every `__main__`."""
    return [
        module
        for module in house
        if module.is_door
        and (module.path.endswith("__main__.py") or '__name__ == "__main__"' in module.text)
    ]


# -------------------- the package, law by law


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


def keep(violations: list[str]) -> None:
    if violations:
        pytest.fail("\n".join(violations), pytrace=False)


def test_the_walk_sees_the_whole_package(house: House) -> None:
    num_files = sum(1 for _ in (ROOT / PACKAGE).glob("**/*.py"))
    assert len(house.modules) == num_files >= 40
    assert {f"{PACKAGE}", f"{PACKAGE}.config", f"{PACKAGE}.schema"} <= house.modules.keys()
    assert sum(len(module.imports) for module in house) > 2 * num_files


def test_a_module_imports_only_lower_floors_or_its_own_room(house: House) -> None:
    keep(lower_floors(house))


def test_rooms_on_one_floor_never_import_each_other(house: House) -> None:
    keep(no_doors_between_rooms(house))


def test_everything_has_a_floor(house: House) -> None:
    keep(known_rooms(house))


def test_the_ground_needs_only_stdlib_numpy_and_pydantic(house: House) -> None:
    keep(ground_libraries(house))


def test_launch_imports_config_only(house: House) -> None:
    keep(launch_is_light(house))


def test_torch_free_modules_do_not_lead_to_torch(house: House) -> None:
    keep(torch_freeness(house))


def test_torch_free_modules_do_not_load_torch_in_a_real_process(house: House) -> None:
    # Importing a `__main__` is the next test's business.
    names = [m.name for m in torch_free_modules(house) if not m.path.endswith("__main__.py")]
    keep(imports_of_torch(ROOT, names))


def test_help_of_every_door_comes_without_torch(house: House) -> None:
    for door in doors(house):
        outcome, output = run_door(ROOT, door.name, "--help")
        assert outcome == "exit=0 torch=False", f"python -m {door.name} --help\n{output}"


@pytest.mark.parametrize("name", [f"{PACKAGE}.train", f"{PACKAGE}.learner.__main__"])
def test_config_errors_come_without_torch(house: House, name: str) -> None:
    if name not in house.modules:
        pytest.skip(f"there is no {name} yet")
    outcome, output = run_door(ROOT, name, "--set", "no_such_section.key=1")
    assert outcome == "exit=2 torch=False", f"python -m {name}, unknown key\n{output}"


def test_only_the_wire_boundary_imports_zmq(house: House) -> None:
    keep(zmq_boundary(house))


def test_only_the_handoff_mixes_asyncio_and_threading(house: House) -> None:
    keep(asyncio_boundary(house))


def test_only_the_loader_owns_cuda_streams(house: House) -> None:
    keep(stream_boundary(house))


def test_there_is_no_pickle(house: House) -> None:
    keep(no_pickle(house))


def test_each_module_has_its_mirror_test(house: House) -> None:
    keep(mirror_tests(house))


def test_files_are_named_after_what_they_hold(house: House) -> None:
    keep(file_names(house))


def test_files_stay_short(house: House) -> None:
    keep(file_sizes(house))


def test_functions_stay_short(house: House) -> None:
    keep(function_sizes(house))


def test_each_module_has_a_docstring(house: House) -> None:
    keep(docstrings(house))


def test_actor_and_learner_modules_say_where_they_run(house: House) -> None:
    keep(runs_on(house))


def test_only_doors_and_the_console_sink_print(house: House) -> None:
    keep(no_print(house))


def test_broad_except_stays_in_its_places(house: House) -> None:
    keep(no_broad_except(house))


def test_minibatch_is_a_word_of_the_buffer_and_of_a_key_only(house: House) -> None:
    keep(the_word_minibatch(house))


# -------------------- the laws, tried on a fake tree

Law = Callable[[House], list[str]]

CLEAN = {
    "impala_async/__init__.py": '"""A house."""\n',
    "impala_async/errors.py": '"""Errors."""\nimport numpy as np\n',
    "impala_async/config/__init__.py": '"""Settings."""\n',
    "impala_async/config/run.py": '"""Knobs."""\nfrom ..errors import np\n',
    "impala_async/wire/__init__.py": '"""The wire."""\n',
    "impala_async/wire/codec.py": '"""Frames."""\nfrom impala_async.config import run\n',
    "impala_async/wire/sockets.py": '"""Sockets."""\nimport zmq\n',
    "impala_async/training/__init__.py": '"""The workshop."""\n',
    "impala_async/training/step.py": '"""A step."""\nimport torch\n',
    "impala_async/learner/__init__.py": '"""The learner."""\n',
    "impala_async/learner/loop/__init__.py": '"""Its loop."""\n',
    "impala_async/learner/loop/ingest.py": (
        '"""Ingest.\n\nRuns on: event loop\n"""\n'
        "import asyncio\nfrom ...wire import sockets\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from ...training import step\n"
        "def late():\n    from impala_async.training.step import torch\n"
    ),
    "impala_async/learner/handoff.py": (
        '"""Hand over.\n\nRuns on: event loop, learner thread\n"""\n'
        "import asyncio\nimport threading\n"
    ),
    "impala_async/learner/minibatch_buffer.py": (
        '"""The ring.\n\nRuns on: learner thread\n"""\nclass MinibatchBuffer:\n    pass\n'
    ),
    "impala_async/learner/__main__.py": (
        '"""A door.\n\nRuns on: event loop\n"""\nfrom impala_async import train\n'
        "minibatch_buffer_size = 1\nprint(minibatch_buffer_size)\n"
    ),
    "impala_async/train.py": (
        '"""A door."""\ntry:\n    import impala_async.wire.codec\nexcept Exception:\n    raise\n'
    ),
}
MIRRORS = (
    *("test_errors.py", "config/test_run.py", "test_train.py", "training/test_step.py"),
    *("wire/test_codec.py", "wire/test_sockets.py"),
    *("learner/loop/test_ingest.py", "learner/test_handoff.py", "learner/test_minibatch_buffer.py"),
)

LAWS: list[Law] = [
    lower_floors, no_doors_between_rooms, known_rooms, ground_libraries, launch_is_light,
    torch_freeness, zmq_boundary, asyncio_boundary, stream_boundary, no_pickle, mirror_tests,
    file_names, file_sizes, function_sizes, docstrings, runs_on, no_print, no_broad_except,
    the_word_minibatch,
]  # fmt: skip

# law, the file that breaks it, its source after the docstring on line 1, the line to be named
BROKEN: list[tuple[Law, str, str, int]] = [
    (lower_floors, "wire/codec.py", "from impala_async.learner.loop import ingest", 2),
    (lower_floors, "wire/codec.py", "def f():\n    from ..learner.loop.ingest import late", 3),
    (lower_floors, "wire/codec.py", "x = 1\n__import__('impala_async.train')", 3),
    (lower_floors, "errors.py", "from . import wire", 2),
    (lower_floors, "training/step.py", "import impala_async.train", 2),
    (no_doors_between_rooms, "envs/make.py", "from impala_async.wire import codec", 2),
    (no_doors_between_rooms, "actor/client.py", "import impala_async.learner.loop.ingest as i", 2),
    (no_doors_between_rooms, "actor/__main__.py", "import impala_async.learner.loop.ingest", 2),
    (known_rooms, "attic/box.py", "", 1),
    (known_rooms, "attic.py", "", 1),
    (ground_libraries, "config/run.py", "import msgpack", 2),
    (launch_is_light, "launch/local.py", "from impala_async.wire import codec", 2),
    (torch_freeness, "wire/codec.py", "import torch.nn", 1),
    (torch_freeness, "envs/make.py", "import impala_async.training.step", 1),
    (torch_freeness, "evaluate.py", "try:\n    from torch import nn\nfinally:\n    pass", 1),
    (torch_freeness, "wire/codec.py", "class A:\n    import safetensors.torch", 1),
    (zmq_boundary, "wire/codec.py", "import os\nfrom zmq import Context", 3),
    (zmq_boundary, "learner/loop/ingest.py", "import zmq.asyncio", 2),
    (asyncio_boundary, "learner/thread.py", "import asyncio\nfrom threading import Thread", 3),
    (stream_boundary, "training/step.py", "import torch as t\ns = t.cuda.Stream()", 3),
    (stream_boundary, "training/step.py", "from torch.cuda import Stream", 2),
    (no_pickle, "wire/codec.py", "from pickle import loads", 2),
    (no_pickle, "training/step.py", "import torch\ntorch.load('x')", 3),
    (no_pickle, "training/step.py", "from torch import save as keep", 2),
    (no_pickle, "wire/sockets.py", "def f(s):\n    return s.recv_pyobj()", 3),
    (no_pickle, "schema.py", "import numpy\nnumpy.load('x', allow_pickle=True)", 3),
    (mirror_tests, "wire/messages.py", "", 1),
    (file_names, "wire/utils.py", "", 1),
    (file_names, "learner/common/queue.py", "", 1),
    (file_sizes, "wire/codec.py", "x = 1\n" * MAX_FILE_LINES, MAX_FILE_LINES + 1),
    (function_sizes, "wire/codec.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, 2),
    (runs_on, "learner/slots.py", "x = 'Runs on: event loop'", 1),
    (no_print, "wire/codec.py", "print('x')", 2),
    (no_broad_except, "wire/codec.py", "try:\n    x = 1\nexcept:\n    raise", 4),
    (no_broad_except, "wire/codec.py", "try:\n    x = 1\nexcept (E, Exception):\n    raise", 4),
    (no_broad_except, "wire/codec.py", "import contextlib as c\nc.suppress(Exception)", 3),
    (the_word_minibatch, "wire/codec.py", "def f(minibatches): ...", 2),
    (the_word_minibatch, "training/mini_batch.py", "", 1),
]  # fmt: skip


@pytest.fixture
def build(tmp_path: Path) -> Callable[[dict[str, str]], House]:
    """Builds a small house that keeps every law, changed as the test likes."""

    def make(changes: dict[str, str]) -> House:
        mirrors = {f"tests/{name}": "" for name in MIRRORS}
        for name, text in (CLEAN | mirrors | changes).items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return House(tmp_path)

    return make


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_house_in_order_breaks_no_law(
    build: Callable[[dict[str, str]], House], law: Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    for allowed in (WITHOUT_MIRROR, LONG_FILES, LONG_FUNCTIONS, BROAD_EXCEPT_FILES):
        for entry in list(allowed):
            monkeypatch.delitem(allowed, entry)
    assert law(build({})) == []


@pytest.mark.parametrize(
    ("law", "path", "source", "line"),
    BROKEN,
    ids=[f"{law.__name__}-{index}" for index, (law, *_) in enumerate(BROKEN)],
)
def test_a_broken_law_is_seen(
    build: Callable[[dict[str, str]], House], law: Law, path: str, source: str, line: int
) -> None:
    broken = build({f"impala_async/{path}": f'"""Broken."""\n{source}\n'})
    assert any(found.startswith(f"impala_async/{path}:{line}: ") for found in law(broken))


def test_a_missing_docstring_is_seen(build: Callable[[dict[str, str]], House]) -> None:
    assert docstrings(build({"impala_async/schema.py": "x = 1\n"})) != []


def test_every_law_has_a_tree_that_breaks_it() -> None:
    assert {law for law, *_ in BROKEN} | {docstrings} == set(LAWS)


def test_a_package_that_imports_torch_burdens_its_modules(
    build: Callable[[dict[str, str]], House],
) -> None:
    house = build({"impala_async/learner/__init__.py": '"""."""\nfrom ..training import step\n'})
    assert any("/learner/loop/ingest.py:" in found for found in torch_freeness(house))


def test_the_chain_to_torch_is_told(build: Callable[[dict[str, str]], House]) -> None:
    house = build({"impala_async/wire/codec.py": '"""."""\nfrom ..training import step\n'})
    [found] = [text for text in torch_freeness(house) if "/wire/codec.py" in text]
    assert found.endswith("impala_async.wire.codec -> impala_async.training.step -> torch")


@pytest.mark.parametrize(
    ("allowed", "law"),
    [
        (WITHOUT_MIRROR, mirror_tests),
        (LONG_FILES, file_sizes),
        (LONG_FUNCTIONS, function_sizes),
        (BROAD_EXCEPT_FILES, no_broad_except),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_stale_exception_is_seen(
    build: Callable[[dict[str, str]], House],
    monkeypatch: pytest.MonkeyPatch,
    allowed: dict[str, str],
    law: Law,
) -> None:
    monkeypatch.setitem(allowed, "wire/codec.py", "for this test")
    assert any(found.startswith("wire/codec.py: ") for found in law(build({})))


FAKE_TORCH = {
    "torch.py": "nn = None\n",
    "impala_async/envs/late.py": "def f():\n    import torch\n",
}


def test_a_real_process_tells_who_loads_torch(build: Callable[[dict[str, str]], House]) -> None:
    root = build(
        FAKE_TORCH | {"impala_async/envs/bad.py": "from impala_async.training import step\n"}
    )
    names = ["impala_async.envs.late", "impala_async.envs.bad", "impala_async.errors"]
    assert imports_of_torch(root.root, names) == ["impala_async.envs.bad: imports torch"]


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import sys\nprint(sys.argv[1])\n", "exit=0 torch=False"),
        ("import torch\n", "exit=0 torch=True"),
        ("raise SystemExit(2)\n", "exit=2 torch=False"),
    ],
)
def test_a_real_process_tells_of_a_door(
    build: Callable[[dict[str, str]], House], source: str, outcome: str
) -> None:
    root = build(FAKE_TORCH | {"impala_async/evaluate.py": source})
    assert run_door(root.root, "impala_async.evaluate", "--help")[0] == outcome
