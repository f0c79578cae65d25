"""The benchmark beside the peers: which visits are made, what is kept, and what the table says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import peers
from benchmarks.peers_arms import ARMS, Arm, ArmFailed, Place, running, shown, why
from benchmarks.peers_table import Kept, Measure, Sizes, best_peer, markdown, median_of, missed, row
from benchmarks.report import DOCUMENT, RESULTS
from tests.vllm.harness import EngineProcess

SIZES = Sizes(rounds=2, samples=1, batches=1, turns=1, rest_s=0, idle_s=0)
TTFT = Measure("ttft", "TTFT", "ms")
CHAT = Measure("chat", "chat", "requests/s", more_is_better=True)


def kept(name: str, *visits: dict[str, float], caches: bool = True, failed: str = "") -> Kept:
    """What is kept of an arm after these visits."""
    return Kept(
        name, f"the {name}", caches, SIZES, "a machine", versions=f"{name} 1", failed=failed,
        commands=[f"run {name}"], visits=list(visits), times=["2026-01-01 10:00"] * len(visits),
    )  # fmt: skip


def test_every_round_visits_each_arm_once_in_changing_order() -> None:
    """Goal: no arm is always the first, when the machine is coldest."""
    nothing_yet = {arm.name: kept(arm.name) for arm in ARMS}
    visits = [(number, arm.name) for number, arm in peers.wanted(SIZES, nothing_yet, only=[])]
    names = [arm.name for arm in ARMS]
    assert [number for number, _ in visits] == [0] * len(ARMS) + [1] * len(ARMS)
    assert [name for number, name in visits if number == 0] == names
    assert [name for number, name in visits if number == 1] == names[1:] + names[:1]


def test_what_is_kept_and_what_has_failed_is_not_visited_again() -> None:
    state = {arm.name: kept(arm.name, {"ttft": 1.0}, {"ttft": 1.0}) for arm in ARMS}
    assert list(peers.wanted(SIZES, state, only=[])) == []
    state["lmcache"].visits.pop()
    state["mooncake"] = kept("mooncake", failed="no wheel")
    assert [(n, arm.name) for n, arm in peers.wanted(SIZES, state, only=[])] == [(1, "lmcache")]
    assert list(peers.wanted(SIZES, state, only=["kvbm"])) == []


def test_an_arm_that_fails_between_rounds_is_left_at_once() -> None:
    """Goal: what cannot run costs its start once, not in each round."""
    state = {arm.name: kept(arm.name) for arm in ARMS}
    made = []
    for number, arm in peers.wanted(SIZES, state, only=[]):
        made.append((number, arm.name))
        if arm.name == "offloading":
            state["offloading"].failed = "asks for a GPU"
    assert [number for number, name in made if name == "offloading"] == [0]
    assert [number for number, name in made if name == "kvbm"] == [0, 1]


def test_kept_figures_come_back_if_they_are_of_the_same_run(tmp_path: Path) -> None:
    arm = ARMS[0]
    mine = peers.kept_of(arm, SIZES, tmp_path)
    assert mine.visits == []
    mine.visits.append({"ttft": 2.5})
    peers.keep(mine, tmp_path)
    assert peers.kept_of(arm, SIZES, tmp_path) == mine
    other = msgspec.structs.replace(SIZES, samples=9)
    assert peers.kept_of(arm, other, tmp_path).visits == []
    mine.machine = "another machine"
    peers.keep(mine, tmp_path)
    assert peers.kept_of(arm, SIZES, tmp_path).visits == []


def test_a_torn_file_is_named_and_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{ARMS[0].name}.json"
    path.write_text('{"name": "kvbm", "visi')
    assert peers.kept_of(ARMS[0], SIZES, tmp_path).visits == []
    assert str(path) in capsys.readouterr().err


def test_ratios_are_those_of_the_rounds_and_say_how_many_times_better_we_are() -> None:
    """Goal: a machine that was slow in one round changes no ratio."""
    ours = kept("kvbm", {"ttft": 10.0, "chat": 4.0}, {"ttft": 100.0, "chat": 4.0})
    alone = kept("alone", {"ttft": 5.0, "chat": 1.0}, {"ttft": 50.0, "chat": 1.0}, caches=False)
    peer = kept("peer", {"ttft": 20.0, "chat": 8.0}, {"ttft": 200.0, "chat": 8.0})
    arms = [ours, alone, peer]
    assert row(TTFT, arms) == ["TTFT, ms", "55", "27.5", "110", "0.50", "2.00", "yes"]
    assert row(CHAT, arms) == ["chat, requests/s", "4", "1", "8", "4.00", "0.50", "NO"]
    assert list(missed([TTFT, CHAT], arms)) == ["chat"]


def test_the_best_peer_is_the_one_that_is_hardest_to_beat() -> None:
    arms = [kept("kvbm", {"ttft": 10.0}), kept("one", {"ttft": 30.0}), kept("two", {"ttft": 12.0}),
            kept("alone", {"ttft": 1.0}, caches=False)]  # fmt: skip
    assert best_peer(TTFT, arms) == ("the two", 1.2)


def test_only_rounds_that_both_have_seen_are_compared() -> None:
    ours = kept("kvbm", {"ttft": 10.0}, {"ttft": 10.0})
    peer = kept("peer", {"chat": 1.0}, {"ttft": 15.0})
    assert best_peer(TTFT, [ours, peer]) == ("the peer", 1.5)
    assert best_peer(TTFT, [kept("kvbm", {"ttft": 10.0}), peer]) is None


def test_a_cell_is_one_cell_whatever_a_log_says() -> None:
    arms = [kept("kvbm"), kept("alone", caches=False), kept("peer", failed="Error: `a` | b")]
    (line,) = [one for one in markdown("", [], arms).splitlines() if "Error" in one]
    assert line == "| the peer | peer 1 | 0 | ended: `Error: 'a' \\| b`<br>`run peer` |"


def test_an_arm_without_its_environment_says_so_and_names_no_path_of_this_machine() -> None:
    """Goal: an environment that could not be made ends its own arm only."""
    root = Path(peers.__file__).parents[1]

    def start(_: Place) -> EngineProcess:
        raise FileNotFoundError(f"no file '{root}/.venv-x/bin/python'")

    with (
        pytest.raises(ArmFailed, match=r"^FileNotFoundError: no file '\.venv-x/bin/python'$"),
        running(Arm("x", "an arm", start), "no model"),
    ):
        pass


def test_an_arm_that_does_not_run_has_no_figures_and_says_why() -> None:
    arms = [kept("kvbm", {"ttft": 10.0}), kept("alone", {"ttft": 9.0}, caches=False),
            kept("peer", failed="Exception: asks for a GPU")]  # fmt: skip
    text = markdown("a title", [TTFT], arms)
    assert "| TTFT, ms | 10 | 9 | – | 0.90 |  |  |" in text
    assert "| the peer | peer 1 | 0 | ended: `Exception: asks for a GPU`<br>`run peer` |" in text
    assert median_of(arms[2], "ttft") is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("AssertionError: :\nINFO hello\n  File x\nException: needs a GPU\n",
         "Exception: needs a GPU"),
        ("AssertionError: it has ended:\nValueError: a\nERROR 1 vllm.Bad: RuntimeError: b\nbye",
         "RuntimeError: b"),
        ("AssertionError: cold 520: 64 tokens of 520 were cached",
         "AssertionError: cold 520: 64 tokens of 520 were cached"),
        ("FileNotFoundError: [Errno 2] no python", "FileNotFoundError: [Errno 2] no python"),
    ],
)  # fmt: skip
def test_the_reason_is_the_last_error_of_the_log(text: str, line: str) -> None:
    assert why(text) == line


def test_command_lines_name_no_paths_or_ports_of_this_run() -> None:
    root = Path(peers.__file__).parents[1]
    command = (
        f'{root}/.venv/bin/python -m x /tmp/m/model --port 21345 \'{{"lmcache.mp.port": 21345, '
        '"runtime_dir": "/tmp/kvbm-abc/run", "block_size": 64}\' --log /run/d/log'
    )
    assert shown(command, "/tmp/m/model", Path("/run/d")) == (
        '.venv/bin/python -m x MODEL --port PORT \'{"lmcache.mp.port": PORT, '
        '"runtime_dir": "DIRECTORY", "block_size": 64}\' --log DIRECTORY/log'
    )


ORPHANS = """
import subprocess, sys
from benchmarks import descendants
descendants.adopt_orphans()
spin = (
    "import time; now = time.process_time\\nwhile now() < 0.2: pass\\n"
    "print('spun', flush=True); time.sleep(60)"
)
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spin!r}]); input()"
before = descendants.cpu_seconds()
child = subprocess.Popen(
    [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
assert child.stdout.readline() == b"spun\\n"
print(len(descendants.descendants()), descendants.memory_bytes() > 1 << 20)
child.stdin.close()
child.wait(10)
print(descendants.cpu_since(before) > 0.19)
spared = subprocess.Popen(["sleep", "60"])
print(["time.sleep" in line for line in descendants.end_all(spare=[spared.pid])])
print(descendants.descendants() == [spared.pid])
spared.kill()
print(spared.wait(10))
"""


def test_orphans_are_counted_and_ended() -> None:
    """Goal: nothing that an arm has started costs the next arm a core."""
    ended = subprocess.run(
        [sys.executable, "-c", ORPHANS], cwd=Path(peers.__file__).parents[1],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.stdout.splitlines() == ["2 True", "True", "[True]", "True", "-9"], ended.stderr


TOLD_TO_END = """
import os, signal, sys
from benchmarks import peers
peers.unwind_on_signals()
try:
    os.kill(os.getpid(), int(sys.argv[1]))
    signal.pause()
finally:
    print("cleaned")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_leaves_nothing(number: int) -> None:
    """Goal: no arena of 2 GB in shared memory, no model, no server."""
    ended = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END, str(int(number))],
        cwd=Path(peers.__file__).parents[1], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ended.stdout, ended.returncode) == ("cleaned\n", 128 + number), ended.stderr


def test_the_documents_table_is_that_of_the_kept_figures() -> None:
    """Goal: no figure in the document that no run has printed."""
    section = DOCUMENT.read_text().split("<!-- peers -->\n")[1].split("<!-- end -->")[0]
    files = sorted((RESULTS / "peers").glob("*.json"))
    if not files:
        assert section == "", "a table without its figures"
        return
    found = {one.stem: msgspec.json.decode(one.read_bytes(), type=Kept) for one in files}
    arms = [found[arm.name] for arm in ARMS]
    assert section == markdown(section.split(":\n")[0], peers.MEASURES, arms)
