"""Parses pages of documentation: code blocks, their expected output, and the commands of shell blocks.

The fence says how a block is run:

- `python`: run in the page's one namespace; `python ranks=4`: on each of 4 ranks, as torchrun would start them, in a
  namespace that the page's blocks of as many ranks share; `python file=train.py`: written to that file, for commands
  of the page.
- `bash`: its commands are run, except those of `NOT_RUN`. Of output to standard error only that of a command that ends
  with `2>&1` is compared.
- `text`: the output of the block just before it; … stands for anything, on a line of its own for any lines. Before the
  first other block of a page it is not checked. `text figures`: numbers, and the blanks and rules around them, may
  differ.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page_id(path: Path) -> str:
    """The page's name in test ids."""
    return path.relative_to(ROOT).with_suffix("").as_posix()


# Commands that these tests do not run, and what covers them instead. Targets of make must exist.
NOT_RUN = {
    "pip install": "makes an environment; CI begins with it",
    "make demo": "makes an environment; test_demo.py runs what it runs there",
    "make test": "is what CI runs",
    "make check": "is what CI runs",
    "make docs": "test_generated.py makes the same, and compares",
    "make docs-site": "is what CI builds in make check",
    "make bench": "takes minutes; test_suites.py runs every suite on tiny sizes",
    "make test-long": "takes longer than CI may; tests themselves",
    "make test-nightly": "takes longer than CI may; the same tests with more requests",
    "make nightly": "is make test, make test-nightly and make test-torch",
    "make test-torch": "downloads another torch; tests themselves",
    "make test-newest": "is what CI runs",
    "make gpu": "needs a GPU; test_gpu_sections.py runs all sections without one",
}

_FENCE = re.compile(r"^(\s*)```(.*)$")
_INFO = re.compile(r"python( (ranks=(?P<ranks>\d+)|file=(?P<file>[\w./-]+)))?|bash|text( figures)?")
_NUMBER = re.compile(r"(\.py:\d+)|\d+(?:[.,]\d+)*")  # line numbers of a file are not figures


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        line: number of its first line of text, from 1.
        shown: the text block that follows, or None; `figures`: numbers in it may differ.
    """

    line: int
    info: str
    text: str
    shown: str | None = None
    figures: bool = False

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def ranks(self) -> int:
        """The number of ranks; 0 for a plain process."""
        match = _INFO.fullmatch(self.info)
        return int(match["ranks"] or 0) if match else 0

    @property
    def file(self) -> str | None:
        match = _INFO.fullmatch(self.info)
        return match["file"] if match else None

    def fault_of_output(self, printed: str) -> str | None:
        """The difference between the output and the page, or None."""
        if self.shown is None:
            return None
        lines = "".join(line + "\n" for line in _plain(printed, self.figures))
        if _pattern(self.shown, self.figures).fullmatch(lines):
            return None
        return f"line {self.line}: printed\n{printed.rstrip()}\nthe page shows\n{self.shown.rstrip()}"


@dataclass(frozen=True)
class Page:
    name: str
    blocks: tuple[Block, ...]
    faults: tuple[str, ...]
    """Fences that are not understood."""


def read_page(path: Path) -> Page:
    return parse_page(path.name, path.read_text(encoding="utf-8"))


def parse_page(name: str, text: str) -> Page:
    lines, blocks, faults = text.split("\n"), [], []
    at, just_before = 0, False  # whether only blank lines follow the last block
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            just_before = just_before and not lines[at].strip()
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), None)
        if end is None or fence[1] or not _INFO.fullmatch(fence[2]):
            faults.append(f"{name}, line {at + 1}: a fence {lines[at]!r}; allowed: see tests/docs/pages.py")
            end = len(lines) if end is None else end
        else:
            block = Block(at + 2, fence[2], "\n".join(lines[at + 1 : end]) + "\n")
            if block.language != "text":
                blocks.append(block)
            elif just_before:
                last = blocks.pop()
                blocks.append(Block(last.line, last.info, last.text, block.text, "figures" in block.info))
            elif blocks:
                faults.append(f"{name}, line {at + 1}: a text block with no block before it")
            just_before = block.language != "text"
        at = end + 1
    return Page(name, tuple(blocks), tuple(faults))


@dataclass(frozen=True)
class Command:
    """A command line of a shell block: the variables set before it, and its words."""

    line: int
    environment: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


def commands(block: Block) -> list[Command]:
    """The commands of a shell block; a backslash continues a line."""
    found, text, first = [], "", None
    for number, line in enumerate(block.text.split("\n"), block.line):
        first = first or number
        text += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        words = shlex.split(text, comments=True)
        if words:
            cut = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
            pairs = tuple(tuple(word.split("=", 1)) for word in words[:cut])
            found.append(Command(first, pairs, tuple(words[cut:])))  # type: ignore[arg-type]
        text, first = "", None
    return found


def not_run(command: Command) -> str | None:
    """The reason if the command is in `NOT_RUN`, else None."""
    return NOT_RUN.get(" ".join(command.words[:2]))


def _plain(text: str, figures: bool) -> list[str]:
    lines = [line.rstrip() for line in text.strip("\n").split("\n")]
    if not figures:
        return lines
    # The width of columns depends on their numbers.
    bare = (re.sub(r"[\s━─┃│╇╪]+", " ", _NUMBER.sub(lambda found: found[1] or "0", line)).strip() for line in lines)
    return [line for line in bare if line]


def _pattern(shown: str, figures: bool) -> re.Pattern:
    lines = _plain(shown, figures)
    return re.compile(
        "".join(r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n" for line in lines)
    )
