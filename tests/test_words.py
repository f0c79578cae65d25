"""House rules for the English of docstrings and comments, as counts that may only fall."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_tidy import PACKAGES

BANNED = (
    "whoever", "nobody", "somebody", "anew", "for ever", "is none", "is said", "is told",
    "of which", "has been asked", "anybody", "everybody",
)  # fmt: skip
"""The subject of a sentence is the thing: these hide it, or speak of a person who is not there."""
BANNED_PATTERN = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
DOCSTRING_WORDS_MIN = 4

VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())
"""What a function's docstring may begin with. A verb that is missing here is added."""

BOUNDS: dict[str, tuple[int, int]] = {
    "kvbm_common": (0, 0),
    "kvbm_cli": (0, 0),
    "kvbm_index": (0, 0),
    "kvbm_host_tier": (0, 0),
    "kvbm_disk_tier": (0, 0),
    "kvbm_metrics": (0, 0),
    "kvbm_connectors": (0, 0),
}
"""Package → (banned phrases, docstrings that are too short). Lower a bound when a count falls."""

FRAGMENTS = ("Of ", "Those ", "That of ", "The same", "They ", "So many ", "Whose ", "As in ")
"""What a text that needs the line above it begins with."""

CLAUSE = re.compile(r"(?:What|Who)\b|[^.]*\?(?:\s|$)")
"""A docstring that begins like this leaves out its noun ("What a file holds"), or is a question."""
CLAUSE_OF_A_THING = re.compile(r"(?:How|Where|When|Why|Which)\b")
"""A property may be "How many"; a class and a module have a noun."""
THING_LEFT_OUT = re.compile(r"\s*(?:What|How|Which|Whether)\b")
"""A text that begins like this leaves out its thing and often its unit ("How long it waits")."""
WHO = re.compile(r"(?:^|[.:;] )Who\b")
"""A person as the subject of a sentence, where the thing that acts has a name."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Docstring(NamedTuple):
    """A docstring, and what it is of."""

    line: int
    text: str
    of: type[ast.AST]
    is_property: bool


class Texts(NamedTuple):
    """The texts of a module: its docstrings, those below a name, and all that readers see."""

    docstrings: list[Docstring]
    below: list[tuple[int, str]]
    all: list[tuple[int, str]]


@functools.cache
def texts(source: str) -> Texts:
    """Return the texts of a module, which is parsed once for all rules.

    All are docstrings, messages of errors and logs, and comments.
    """
    found = Texts([], [], [])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            by = getattr(node, "decorator_list", [])
            is_property = any("property" in ast.unparse(one) for one in by)
            found.docstrings.append(Docstring(node.body[0].lineno, text, type(node), is_property))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                found.below.append((node.lineno, node.value.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            found.all.append((node.lineno, node.value))
    lines: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:  # Those of consecutive lines are one text.
            if lines and token.start[0] > last + 1:
                found.all.append((last, " ".join(lines)))
                lines = []
            lines.append(token.string.lstrip("# "))
            last = token.start[0]
    found.all.append((last, " ".join(lines)))
    return found


def banned_of(source: str) -> list[tuple[int, str]]:
    """Return line and phrase of everything that is banned."""
    found = (
        (line, phrase)
        for line, text in texts(source).all
        for phrase in BANNED_PATTERN.findall(" ".join(text.split()))
    )
    return [(line, phrase) for line, phrase in found if not phrase.endswith("None")]  # Python's.


def too_short(source: str) -> list[tuple[int, str]]:
    """Return line and text of the docstrings with too few words to stand alone."""
    found = texts(source).docstrings
    return [(one.line, one.text) for one in found if len(one.text.split()) < DOCSTRING_WORDS_MIN]


def not_begun_by_a_verb(source: str) -> list[tuple[int, str]]:
    """Return line and text of functions' docstrings that begin with something else.

    A property is a thing: its docstring may begin with a noun.
    """
    return [
        (one.line, one.text)
        for one in texts(source).docstrings
        if issubclass(one.of, ast.FunctionDef | ast.AsyncFunctionDef) and not one.is_property
        if re.split(r"[^A-Za-z]", one.text, maxsplit=1)[0].lower() not in VERBS
    ]


def fragments_of(source: str) -> list[tuple[int, str]]:
    """Return line and text of the strings below a name or a definition that do not stand alone."""
    return [(line, text) for line, text in texts(source).below if text.startswith(FRAGMENTS)]


def clauses_of(source: str) -> list[tuple[int, str]]:
    """Return line and text of the docstrings that are questions, or clauses without a noun."""
    return [
        (one.line, one.text)
        for one in texts(source).docstrings
        if CLAUSE.match(one.text)
        or (issubclass(one.of, ast.Module | ast.ClassDef) and CLAUSE_OF_A_THING.match(one.text))
    ]


def things_left_out_of(source: str) -> list[tuple[int, str]]:
    """Return line and text of the strings below a name or a definition that begin as a clause."""
    return [(line, text) for line, text in texts(source).below if THING_LEFT_OUT.match(text)]


def persons_of(source: str) -> list[tuple[int, str]]:
    """Return line and text of what has a person as its subject ("Who asks waits for it")."""
    return [(line, text) for line, text in texts(source).all if WHO.search(" ".join(text.split()))]


def offences(package: Path) -> tuple[list[str], list[str]]:
    """Return what breaks each of the two rules in a package, with its place."""
    banned: list[str] = []
    short: list[str] = []
    for path in sorted(package.rglob("*.py")):
        source, place = path.read_text(), path.relative_to(package.parent)
        banned += [f"{place}:{line}: {phrase}" for line, phrase in banned_of(source)]
        short += [f"{place}:{line}: {text}" for line, text in too_short(source)]
    return banned, short


def test_rules_see_docstrings_attributes_and_comments() -> None:
    """Goal: the counts below are of what they say."""
    source = (
        '"""Nobody reads a module of which the name is bad, or is None."""\n'
        'X = 1\n"""Made anew."""\n'
        "# It is\n# none any more, and whoever\n"
        'def f() -> None:\n    """Of one name."""\n'
        'def g() -> None:\n    """Return nothing at all."""\n    print("it is said to anybody")\n'
    )
    assert sorted(phrase for _, phrase in banned_of(source)) == [
        "Nobody", "anew", "anybody", "is none", "is said", "of which", "whoever",
    ]  # fmt: skip
    assert too_short(source) == [(7, "Of one name.")]


def test_rule_of_verbs_sees_functions_and_methods() -> None:
    """Goal: nouns and sentences are found; properties and classes may begin with a noun."""
    source = (
        'class C:\n    """A thing of its own kind."""\n'
        '    def f(self) -> int:\n        """The number of all things."""\n'
        '    @property\n    def g(self) -> int:\n        """The number of all things."""\n'
        '    async def h(self) -> int:\n        """Return the number of things; 0: none."""\n'
    )
    assert not_begun_by_a_verb(source) == [(4, "The number of all things.")]


def test_fragments_below_names_are_seen() -> None:
    """Goal: constants and attributes are read as well, and words that only begin alike are not."""
    source = 'X = 1\n"""Of a name."""\nclass C:\n    y = 2\n    """Offers of an engine."""\n'
    assert fragments_of(source) == [(2, "Of a name.")]


def test_clauses_and_questions_are_seen() -> None:
    """Goal: properties are read as well; a text below an attribute may be a clause."""
    source = (
        '"""What a module holds."""\nclass B:\n    """How it is held."""\n'
        'class C:\n    """Things: what they are."""\n    x = 1\n    """What it is worth."""\n'
        '    @property\n    def g(self) -> bool:\n        """Is it there\n\n        now? No."""\n'
        'def f() -> None:\n    """Whatever is there goes."""\n'
    )
    assert sorted(line for line, _ in clauses_of(source)) == [1, 3, 10]


def test_texts_that_leave_out_their_thing_are_seen() -> None:
    """Goal: constants, attributes and properties are read; a noun or a verb is no offence."""
    source = (
        'WAIT_S = 5.0\n"""How long it waits."""\nCOUNT = 1\n"""The number of parts."""\n'
        'class C:\n    x = True\n    """\n    Which one it is."""\n'
        '    @property\n    def g(self) -> bool:\n        """Whether it is there."""\n'
        '    @property\n    def h(self) -> bool:\n        """Tell whether it is there."""\n'
        'Y = 1\n"""Whatever is there, whether it is used or not."""\n'
    )
    assert sorted(line for line, _ in things_left_out_of(source)) == [2, 7, 11]


def test_persons_are_seen_as_subjects_only() -> None:
    """Goal: a sentence that begins with a person is found in every text."""
    source = (
        '"""Roles: who may do it. Who asks\nwaits for it."""\n'
        "# Who has a key needs no password.\n"
        'X = "a client, who waits"\n"""WHO is an organisation. Whole blocks are kept."""\n'
    )
    assert [line for line, _ in persons_of(source)] == [1, 3]


def assert_none(package: str, look: Callable[[str], Iterable[tuple[int, str]]]) -> None:
    """Assert that a look at the source of each module of a package finds nothing."""
    found = [
        f"{path.relative_to(PACKAGES[package].parent)}:{line}: {text}"
        for path in sorted(PACKAGES[package].rglob("*.py"))
        for line, text in look(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", BOUNDS)
def test_docstrings_are_neither_clauses_nor_questions(package: str) -> None:
    """Goal: a class and a module begin with their noun, and a docstring states what holds."""
    assert_none(package, clauses_of)


@pytest.mark.parametrize("package", BOUNDS)
def test_texts_begin_with_their_thing(package: str) -> None:
    """Goal: a text below a name says first what it is: a time, a number, a thing, True if."""
    assert_none(package, things_left_out_of)


@pytest.mark.parametrize("package", BOUNDS)
def test_no_sentence_begins_with_a_person(package: str) -> None:
    """Goal: the subject is the thing that acts: a client, a caller, a reader."""
    assert_none(package, persons_of)


@pytest.mark.parametrize("package", BOUNDS)
def test_no_text_below_a_name_is_a_fragment(package: str) -> None:
    """Goal: a constant, an attribute and a function are understood without the line above."""
    assert_none(package, fragments_of)


@pytest.mark.parametrize("package", BOUNDS)
def test_docstring_of_a_function_begins_with_a_verb(package: str) -> None:
    """Goal: a docstring says what a call does, before it says how."""
    assert_none(package, not_begun_by_a_verb)


@pytest.mark.parametrize("package", BOUNDS)
def test_counts_of_offences_only_fall(package: str) -> None:
    """Goal: no text gets worse, and what was mended stays mended."""
    banned, short = offences(PACKAGES[package])
    bounds = BOUNDS[package]
    assert len(banned) <= bounds[0], "\n".join(banned)
    assert len(short) <= bounds[1], "\n".join(short)
    found = (len(banned), len(short))
    assert found == bounds, f"mended: lower the bound of {package} to {found}"


def test_every_package_has_a_bound() -> None:
    """Goal: a new package starts with none of these."""
    assert BOUNDS.keys() == PACKAGES.keys()
