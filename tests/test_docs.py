"""The documentation says what the code says: tables, keys, names, messages, links.

`python tests/test_docs.py` writes the generated tables anew.
"""

import ast
import inspect
import re
import shlex
import sys
import typing
from itertools import pairwise
from pathlib import Path

import pytest

from bench.learning.table import configs_table
from impala_async import actors, doors, errors
from impala_async.config.load import load_config
from impala_async.config.mistakes import FIELDS, is_section, wanted
from impala_async.config.run import RunConfig
from impala_async.config.warnings import warnings_of
from impala_async.launch import __main__ as launch
from impala_async.learner.agreement import REASONS
from impala_async.metrics.merge import RULES
from impala_async.metrics.names import ALIASES, REGISTRY, SECTIONS
from impala_async.metrics.report import ADVICE
from impala_async.runs.start import check_not_over, check_run, settle
from impala_async.wire import messages
from tests import rooms
from tests.runs.test_summary import summary_of
from tests.test_house import House, obscure_openings
from tests.wire.example import example_text

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "impala_async"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("configs/*.md"),
        *ROOT.glob("bench/*.md"),
    ]
)
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
# Others follow in lockstep alone.
FOLLOWING = {"algorithm.num_minibatches", "learner.num_passes"}
REWRITE = "run `python tests/test_docs.py`"


# -------------------- the tables that are generated


def configuration_tables(section=RunConfig, key=""):
    """A table for each section of the config, the keys outside sections first."""
    keys = {field.alias or name: field for name, field in section.model_fields.items()}
    inner = {name: each.annotation for name, each in keys.items() if is_section(each.annotation)}
    told = _docstrings_below(section)
    rows = "".join(
        f"| `{key}{name}` | {wanted(field)} | {_default(field, f'{key}{name}')} | {told[name]} |\n"
        for name, field in keys.items()
        if name not in inner
    )
    title = f"`[{key[:-1]}]`\n\n{section.__doc__}" if key else "Outside of the sections"
    head = "| key | takes | default | what it is |\n|---|---|---|---|\n"
    below = [configuration_tables(each, f"{key}{name}.") for name, each in inner.items()]
    return "\n".join([f"### {title}\n\n{head}{rows}", *below])


def _docstrings_below(section):
    """The text below each field of a class, by the name that a user types."""
    (node,) = ast.parse(inspect.getsource(section)).body
    return {
        field.target.id.rstrip("_"): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _default(field, key):
    if field.is_required():
        return "required"
    if key in FOLLOWING:
        return "it follows"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def metrics_tables():
    """A table per section of the registry."""
    return "\n".join(
        f"## {title}\n\n| name | unit | meaning | of several ranks |\n|---|---|---|---|\n"
        + "".join(
            f"| `{name}` | {unit} | {meaning} | {RULES[name]} |\n"
            for name, unit, meaning in metrics
        )
        for title, metrics in SECTIONS.items()
    )


GENERATED = {
    "docs/architecture.md": rooms.picture,
    "docs/configuration.md": configuration_tables,
    "docs/metrics.md": metrics_tables,
    "docs/protocol.md": example_text,
    "configs/README.md": configs_table,
}


def _with_generated(text, table):
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"no line {BEGIN!r}"
    assert end, f"no line {END!r}"
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_up_to_date(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == _with_generated(text, GENERATED[name]()), REWRITE


def test_the_page_of_metrics_says_what_others_call_them():
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (`\S+`(?:, `\S+`)*) \|$", text, re.MULTILINE)
    told = {alias: name for name, aliases in rows for alias in re.findall(r"`(\S+)`", aliases)}
    assert told == ALIASES


# -------------------- what the pages name exists


def _prose(page):
    """A page without its code blocks."""
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))


def _links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if not re.match(r"[a-z]+:", target):
            yield target


def _anchors(page):
    titles = re.findall(r"(?m)^#+ (.*)$", _prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_links_keys_metrics_files_and_doors_that_are_there(page):
    text = page.read_text(encoding="utf-8")
    assert [*_lost_links(page), *_lost_keys(text), *_lost_metrics(text), *_lost_files(text)] == []


def test_the_sentences_of_a_page_begin_with_what_they_speak_of():
    found = {page.name: [word for _, word in obscure_openings(_prose(page))] for page in PAGES}
    assert {page: words for page, words in found.items() if words} == {}


def _lost_links(page):
    for target in _links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            yield target


def _lost_keys(text):
    sections = "|".join(key for key in RunConfig.model_fields if key != "seed")
    named = set(re.findall(rf"(?:`|--set )((?:{sections})\.[a-z_]+)(?=`|[^`.\w])", text))
    # `train.py` is a file, and `env.step` is what an environment does.
    named = {name for name in named if not name.endswith(".py")}
    return named - FIELDS.keys() - {"env.step", "env.reset"}


def _lost_metrics(text):
    groups = "|".join({name.partition("/")[0] for name in REGISTRY if "/" in name} - {"actor"})
    named = set(re.findall(rf"`((?:{groups})/[a-z_]+)`", text))
    return {name for name in named - REGISTRY.keys() if not (PACKAGE / name).exists()}


def _lost_files(text):
    rooms = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
    places = rf"`((?:impala_async|{rooms}|tests|configs|examples|docs)/[\w/.-]+)`"
    for name in re.findall(places, text):
        if "." in name and not (ROOT / name).exists() and not (PACKAGE / name).exists():
            yield name
    for door in re.findall(r"python -m impala_async\.([\w.]+)", text):
        base = PACKAGE / door.replace(".", "/")
        if not base.with_suffix(".py").exists() and not (base / "__main__.py").exists():
            yield door


@pytest.mark.parametrize("config", sorted(ROOT.glob("configs/*.toml")), ids=lambda path: path.name)
def test_every_config_is_described(config):
    assert f"`{config.name}`" in (ROOT / "configs/README.md").read_text(encoding="utf-8")


# -------------------- the page of many hosts


FLEETS = (ROOT / "docs/fleets.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```\n(.*?)^```", FLEETS)
MANIFESTS = [path.read_text(encoding="utf-8") for path in ROOT.glob("deploy/kubernetes/*.yaml")]


def fleet_commands():
    """The words of each command of the page and its manifests, which have a line for each."""
    for block in [*BLOCKS, *MANIFESTS]:
        whole = re.sub(r"\\\n\s*|\n +- (?=--|learner$|actors$)", " ", block, flags=re.MULTILINE)
        lines = whole.replace(" : ", "\n")  # between those of one mpirun
        for command in re.findall(r"impala[-_]async +((?:learner|actors) +--.*)", lines):
            yield shlex.split(command.removesuffix(" &"))


def test_the_commands_of_the_page_of_many_hosts_are_taken_as_they_stand(monkeypatch):
    found = {"learner": [], "actors": []}
    for door, *flags in fleet_commands():
        found[door].append([re.sub("/(app|srv/mine)/mine.toml", "mine.toml", f) for f in flags])
    assert [len(each) for each in found.values()] == [6, 7]
    parser = doors.new_parser("learner", "")
    doors.add_run_flags(parser)
    for flags in found["learner"]:
        args = parser.parse_args(flags)
        assert args.config == Path("mine.toml")
        args.config = ROOT / "configs/cartpole.toml"
        config, folder = check_run(settle(doors.run_flags_of(args)))
        assert config.bind.data.startswith("tcp://0.0.0.0:")
        assert folder.path == args.run_dir
    begun = []
    monkeypatch.setattr(doors, "run_door", lambda body: body())
    monkeypatch.setattr(actors, "_watch", lambda args: begun.append(args) or 0)
    assert [actors.main(flags) for flags in found["actors"]] == [0] * 7
    for args in begun:
        doors.check_learner(args.learner.replace("$run", "/shared/mine"))


def test_the_launchers_of_the_page_are_taken_and_the_job_is_the_one_that_is_written(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_bytes((ROOT / "configs/cartpole.toml").read_bytes())
    begun, found = [], re.findall(r"impala-async launch ((?:.*\\\n)*.*)", "".join(BLOCKS))
    monkeypatch.setattr(launch, "_ray", lambda args, more: begun.append(args) or 0)
    by_slurm, by_ray = (shlex.split(each.replace("\\\n", "")) for each in found)
    assert launch.main(by_ray) == 0
    assert begun[0].actors == 8
    at = by_slurm.index("--")
    assert launch.main([*by_slurm[:at], "--print", *by_slurm[at:]]) == 0
    written = capsys.readouterr().out.replace(sys.executable, "/srv/mine/.venv/bin/python")
    assert written.replace(str(tmp_path), "/srv/mine") in BLOCKS


# -------------------- the protocol page


MESSAGES = typing.get_args(messages.Message)


@pytest.mark.parametrize("form", MESSAGES, ids=lambda form: form.__name__)
def test_the_protocol_page_has_every_field(form):
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    kind = MESSAGES.index(form)
    assert messages._KINDS[form] == kind
    _, found, part = text.partition(f"\n### {kind} {form.__name__}\n")
    assert found, f"no heading '### {kind} {form.__name__}'"
    rows = re.findall(r"(?m)^\| `(\w+)` \|", part.partition("\n##")[0])
    assert tuple(rows) == form._fields


@pytest.mark.parametrize("words", [messages.VERDICTS, messages.REJECT_CODES, messages.BYE_REASONS])
def test_the_protocol_page_has_every_code(words):
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    for number, word in enumerate(words):
        assert f"| {number} | `{word}` |" in text


# -------------------- the trajectory page


def test_every_verdict_on_a_run_is_explained():
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    table = text.partition("| it begins with |")[2].partition("\n\n")[0]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", table)) == {*ADVICE, "waiting", "unknown"}


def test_what_programs_find_at_the_end_of_a_run_is_on_the_page():
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    part = text.partition("## The end of a run, for programs")[2].partition("\n## ")[0]
    keys, _, reasons = part.partition("| `exit_reason` | the run")
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\|.*", keys))))
    assert named == summary_of().keys()
    first = "".join(re.findall(r"(?m)^\| (`.*?`) \|", reasons))
    assert set(re.findall(r"`(\w+)`", first)) == {*REASONS}


def test_the_trajectory_page_names_each_file_its_imports_and_its_carriers():
    """`│` joins two files of which one imports the other, `┆` two of which neither does."""
    house = House(ROOT)
    modules = {module.path: module for module in house}
    text = (ROOT / "docs/trajectory.md").read_text(encoding="utf-8")
    drawings = re.findall(r"(?s)```text\n(.*?)```\n\n(\d+) files, (\d+) carriers", text)
    assert len(drawings) == 2
    for drawing, num_files, num_carriers in drawings:
        steps = re.findall(r"(?m)^ (\S+\.py) .*?((?: \[\w+\])*)$(?:\n (.)$)?", drawing)
        carriers = [(name, each) for name, each, _ in steps if each]
        assert len(steps) == int(num_files) == drawing.count(".py")
        assert sum(each.count("[") for _, each in carriers) == int(num_carriers)
        for name, each in carriers:
            for carrier in re.findall(r"\w+", each):
                assert f"class {carrier}" in modules[name].text, carrier
        for (above, _, join), (below, _, _) in pairwise(steps):
            pair = {modules[above], modules[below]}
            is_import = any(
                pair == {one, house.resolve(each)} for one in pair for each in one.imports
            )
            assert join == ("│" if is_import else "┆"), (above, below)


# -------------------- the first page, and decisions


def test_exit_codes_are_those_of_the_code_and_the_first_command_comes_early():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(map(int, re.findall(r"(?m)^\| (\d+) \|", text))) == {*errors.Exit}
    lines = text.splitlines()
    assert any(line.startswith("make ") for line in lines[:30])
    assert len(lines) <= 220


def test_the_run_that_the_first_page_resumes_goes_on_learning():
    _, _, command = (ROOT / "README.md").read_text(encoding="utf-8").partition("--resume")
    flags = re.findall(r"--set (\S+)", command.partition("```")[0])
    config = load_config(ROOT / "configs/cartpole.toml", flags)
    done = {"env_steps_trained": 179_304, "updates": 226, "mean_return_100": 475.4}
    check_not_over(config, done)
    assert config.stop.env_steps == config.algorithm.schedule_env_steps == 1_000_000
    assert warnings_of(config, 179_304) == []


def test_decisions_are_numbered_and_whole():
    decisions = sorted(ROOT.glob("docs/adr/[0-9]*.md"))
    assert [int(path.name[:4]) for path in decisions] == list(range(1, len(decisions) + 1))
    for path in decisions:
        titles = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
        assert titles[0].startswith(f"{int(path.name[:4])}. "), path
        assert titles[1:] == ["Context", "Decision", "Consequences"], path
        entry = f"- [{titles[0]}](adr/{path.name})\n"
        assert entry in (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), path


if __name__ == "__main__":
    for name, make in GENERATED.items():
        page = ROOT / name
        page.write_text(_with_generated(page.read_text(encoding="utf-8"), make()), encoding="utf-8")
