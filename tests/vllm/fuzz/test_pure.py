"""The fuzzer's pure parts: drawing, comparing, shrinking. No vLLM here."""

from __future__ import annotations

import fractions
from pathlib import Path

import msgspec
import pytest

from tests.vllm.fuzz import patches
from tests.vllm.fuzz.campaign import Found
from tests.vllm.fuzz.draw import draw
from tests.vllm.fuzz.judge import Failure, differences
from tests.vllm.fuzz.lane import spoil
from tests.vllm.fuzz.plants import PLANTS
from tests.vllm.fuzz.program import Act, Program, Request, Wave, prompt_of, tokens_of
from tests.vllm.fuzz.runner import Result
from tests.vllm.fuzz.shapes import SHAPES
from tests.vllm.fuzz.shrink import shrink
from tests.vllm.fuzz.talk import Answer, Spoken

SEEDS = range(200)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_is_a_program(shape: str) -> None:
    """The same seed draws the same program, which comes back from its line; others differ."""
    programs = [draw(seed, SHAPES[shape]) for seed in SEEDS]
    assert [draw(seed, SHAPES[shape]) for seed in SEEDS] == programs
    assert [Program.of(program.line()) for program in programs] == programs
    assert len({msgspec.structs.replace(program, seed=0).line() for program in programs}) > 190


@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_requests_are_such_as_vllm_takes(shape: str) -> None:
    """Several answers only where they are sampled; names are unique; a turn follows an earlier."""
    for seed in SEEDS:
        seen: set[str] = set()
        for wave in draw(seed, SHAPES[shape]).waves:
            for request in wave.requests:
                assert request.n == 1 or not SHAPES[shape].only_greedy
                assert request.new >= 1
                assert request.tail_tokens >= 1
                assert not request.after or request.after in seen
                assert request.name not in seen
            seen |= {request.name for request in wave.requests}


@pytest.mark.slow
def test_all_acts_are_drawn() -> None:
    """Over all shapes, nothing that the lane can do is left out."""
    programs = [draw(seed, shape) for shape in SHAPES.values() for seed in range(400)]
    drawn = {act.what for program in programs for act in program.acts}
    assert drawn == {
        "adapter", "continue", "corrupt arena", "corrupt disk", "fill disk", "fill memory",
        "fine-tune", "kill", "reset", "reset connector", "reset running", "restart", "start",
        "stop", "weights",
    }  # fmt: skip


@pytest.mark.parametrize("plant", [name for name, plant in PLANTS.items() if plant.often])
def test_what_a_plant_needs_is_drawn_often(plant: str) -> None:
    """Most programs of several waves have it, and the same seed draws the same program again."""
    shape, often = SHAPES[PLANTS[plant].shapes[0]], PLANTS[plant].often
    programs = [draw(seed, shape, often) for seed in SEEDS]
    assert programs == [draw(seed, shape, often) for seed in SEEDS]
    wanted = {"stop" if what == "pause" else what for what in often}
    several = [program for program in programs if len(program.waves) > 1]
    with_it = [p for p in several if wanted <= {act.what for act in p.acts}]
    assert len(with_it) > 0.6 * len(several)


def test_prompts_share_their_beginning() -> None:
    """A system prompt is the same for all, a tail is one's own, a next turn begins with both."""
    one = Request(name="a", system=1, system_tokens=33, tail=7, tail_tokens=5)
    longer = Request(name="b", system=1, system_tokens=40, tail=8, tail_tokens=5)
    first, second = (prompt_of(request, "k", {}, limit=100) for request in (one, longer))
    assert (len(first), len(second)) == (38, 45)
    assert first[:33] == second[:33]
    assert first[33:] != second[33:38]
    turn = Request(name="c", after="a", tail=9, tail_tokens=2)
    spoken = {"a": [*first, 500]}
    assert prompt_of(turn, "k", spoken, limit=100)[:39] == [*first, 500]
    assert len(prompt_of(turn, "k", spoken, limit=20)) == 20
    assert len(prompt_of(turn, "k", {}, limit=100)) == 2


def test_a_period_repeats_itself() -> None:
    tokens = tokens_of("k", 12, period=5)
    assert tokens[:5] == tokens[5:10]
    assert len(tokens) == 12


# --- comparison -------------------------------------------------------------------------------


def answer(*pairs: tuple[int, float | None], finish: str = "length") -> Answer:
    tokens, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
    return Answer(name="r", spoken=[Spoken(tokens=tokens, logprobs=logprobs, finish=finish)])


RIGHT = answer((5, -1.0), (6, -2.0), (7, -3.0))


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        (answer((5, -1.0), (6, -2.0001), (7, -3.0)), []),
        (answer((5, -1.0), (6, -2.1), (7, -3.0)), ["logprobs"]),
        (answer((5, -1.0), (9, -1.5), (7, -3.0)), ["tokens"]),
        (answer((5, None), (6, -2.0), (7, -3.0)), ["logprobs"]),
        (answer((5, -1.0), (6, -2.0)), ["tokens"]),
        (answer((5, -1.0), (6, -2.0), (7, -3.0), (8, -1.0)), ["tokens"]),
        (answer((5, -1.0), (6, -2.0), (7, -3.0), finish="error"), ["finish"]),
        (answer((5, -1.0), finish="stuck"), ["stuck"]),
        (answer((5, -1.0), finish="abort"), ["finish"]),
        (Answer(name="r", spoken=[]), ["finish"]),
    ],
)
def test_what_differs_is_told(found: Answer, kinds: list[str]) -> None:
    failures, ties = differences(found, RIGHT)
    assert [failure.kind for failure in failures] == kinds
    assert ties == 0


def test_a_near_tie_ends_the_comparison() -> None:
    """Two tokens as likely as each other: what follows is another text, and no failure."""
    failures, ties = differences(answer((5, -1.0), (9, -2.0001), (1, -9.0)), RIGHT)
    assert (failures, ties) == ([], 1)


def test_an_aborted_request_is_a_beginning() -> None:
    """It may have ended anywhere, or not have begun; what it said must be right."""
    for found, kinds in (
        (answer((5, -1.0), finish="abort"), []),
        (answer(finish="abort"), []),
        (RIGHT, []),
        (answer((5, -2.0), finish="abort"), ["logprobs"]),
    ):
        failures, _ = differences(found, RIGHT, aborted=True)
        assert [failure.kind for failure in failures] == kinds


def test_prompt_logprobs_are_compared() -> None:
    right = msgspec.structs.replace(RIGHT, prompt_logprobs=[-1.0, -2.0])
    wrong = msgspec.structs.replace(RIGHT, prompt_logprobs=[-1.0, -2.5])
    assert differences(right, right) == ([], 0)
    assert [failure.kind for failure in differences(wrong, right)[0]] == ["prompt logprobs"]
    assert [failure.kind for failure in differences(RIGHT, right)[0]] == ["prompt logprobs"]


# --- shrinking --------------------------------------------------------------------------------


def culprits(program: Program) -> bool:
    """A made-up defect: a reset, and after it a request with a salt and more than 40 tokens."""
    was_reset = False
    for wave in program.waves:
        was_reset |= any(act.what == "reset" for act in wave.acts)
        if was_reset and any(r.salt and r.tail_tokens > 40 for r in wave.requests):
            return True
    return False


def test_a_failure_is_shrunk_to_what_it_needs() -> None:
    """Of every drawn program that has the made-up defect, one request and one act are left."""
    failing = [program for seed in SEEDS if culprits(program := draw(seed, SHAPES["chunked"]))]
    assert len(failing) > 20
    for program in failing:
        small, _ = shrink(program, culprits, runs=2000)
        assert culprits(small)
        assert len(small.requests) == len(small.acts) == 1
        assert small.requests[0].tail_tokens <= 82
        assert small.requests[0].new == 1
        assert not small.requests[0].at


def test_the_shrinker_is_bounded() -> None:
    """In runs, and in time."""
    program = Program(
        seed=1, shape="chunked",
        waves=(Wave(acts=(Act(what="reset"),), requests=tuple(
            Request(name=f"r{n}", salt="red", tail_tokens=50) for n in range(12)
        )),),
    )  # fmt: skip
    assert shrink(program, lambda _: False, runs=3)[1] == 3
    times = iter(range(100))
    assert 0 < shrink(program, lambda _: False, seconds=4, clock=lambda: next(times))[1] <= 4


# --- what a campaign makes of failures ----------------------------------------------------------


def failed(*kinds: str, acts: tuple[str, ...] = ()) -> Found:
    wave = Wave(acts=tuple(Act(what=what) for what in acts), requests=(Request(name="a"),))
    program = Program(seed=1, shape="chunked", waves=(wave,))
    return Found(program=program, failures=[Failure(kind=kind, text="") for kind in kinds])


def test_failures_that_look_alike_are_one() -> None:
    """Of the same kinds, by the same acts: a reset more or less, and how it shows, do not count."""
    known = failed("tokens", acts=("reset", "weights"))
    assert known.looks_like(failed("logprobs", acts=("weights",)))
    assert not known.looks_like(failed("tokens", acts=("weights", "kill")))
    assert not known.looks_like(failed("tokens", "held", acts=("weights",)))
    assert not known.looks_like(failed("stuck", acts=("weights",)))


def test_the_worst_failure_is_what_is_shrunk() -> None:
    """A wrong answer goes before what may only be its cause."""
    assert Result(failures=failed("refused", "tokens").failures).worst == "answers"
    assert Result(failures=failed("refused", "held").failures).worst == "held"
    assert Result().worst == ""


def test_what_is_replaced_is_put_back() -> None:
    """Plants follow each other in one process: none is left over."""
    before = fractions.Fraction.limit_denominator
    patches.replace("fractions", "Fraction", "limit_denominator", 1)
    patches.replace("fractions", "Fraction", "limit_denominator", 2)
    patches.replace_if_there("fractions", "Fraction", "nothing_of_that_name", 3)
    patches.replace_if_there("no_module_of_that_name", "", "anything", 3)
    patches.add("fractions", "Fraction", "nothing_of_that_name", 3)
    assert vars(fractions.Fraction)["limit_denominator"] == 2
    patches.restore()
    assert fractions.Fraction.limit_denominator is before
    assert not hasattr(fractions.Fraction, "nothing_of_that_name")
    with pytest.raises(AssertionError, match="adapt the plant"):
        patches.replace("fractions", "Fraction", "nothing_of_that_name", 3)


def test_every_plant_has_a_shape_that_exists() -> None:
    for name, plant in PLANTS.items():
        assert set(plant.shapes) <= SHAPES.keys(), name


@pytest.mark.parametrize("pattern", ["nan", "noise", "flip"])
def test_spoilt_files_differ_where_something_was(tmp_path: Path, pattern: str) -> None:
    """A hole stays a hole: only what was written is spoilt, the same way for the same number."""
    found = []
    for name in ("one", "two"):
        path = tmp_path / name
        path.write_bytes(bytes(1 << 20) + b"\x3f" * (1 << 20))
        spoil(path, pattern, 7)
        found.append(path.read_bytes())
    assert found[0] == found[1]
    assert found[0][: 1 << 20] == bytes(1 << 20)
    assert found[0][1 << 20 :] != b"\x3f" * (1 << 20)
    assert len(found[0]) == 2 << 20
