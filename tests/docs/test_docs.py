"""The pages of docs/ do what they say: their Python runs and prints what they show, page by page.

The snippets of a page run in order in one namespace, on the eager backend where none is given (`reuse_outputs`, which
means nothing to it, is left out there). Two kinds of outputs follow a snippet: ```text, compared whole but for times,
and ```console, compared by the first word of each line, for numbers that differ between machines. So are the outputs of
commands (`$ psg-fx ...`) where they are shown. A snippet that starts with `# name.py` is also a file. Graphs and texts
of errors are those of the pinned torch; with another one nothing is compared.

`python tests/docs/test_docs.py PAGE...` writes what snippets and commands print into the pages.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import linecache
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import psg_fx
from psg_fx import cli
from psg_fx.planner import expr
from support.selection import selected

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT / "docs").with_suffix(""))
    for folder in ("", "guides")
    for path in (ROOT / "docs" / folder).glob("*.md")
)
PINNED = f"torch=={torch.__version__.split('+')[0]}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
LONG = {"export", "private", "ragged", "limits", "migrating", "guides/calling", "guides/trainer"}
"""The pages that take longest: in the rest, but for quantities."""
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```$(?:\n\n\1```(text|console)\n(?!\$ )(.*?)^\1```$)?", re.S | re.M)
COMMAND = re.compile(r"^```console\n\$ psg-fx ([^\n]*)\n(.*?)^```$", re.S | re.M)
SHAPE = re.compile(r"(\S+) +# (\[[\d, ]+\])$")


@dataclass
class Snippet:
    """Code of a page, and the output that the page shows."""

    code: str
    kind: str
    shown: str

    @classmethod
    def of(cls, match: re.Match[str]) -> Snippet:
        """From a match of SNIPPET."""
        indent, code, kind, shown = match.groups(default="")
        return cls(re.sub(f"^{indent}", "", code, flags=re.M), kind, shown)

    @property
    def is_quoted(self) -> bool:
        """A rule of psg_fx, shown as an example of how one is written."""
        return self.code.startswith(("@rule(", "@sample_rule("))

    def compared(self, printed: str) -> tuple[Any, Any]:
        """What must be equal."""
        form = first_words if self.kind == "console" else settled
        return form(printed), form(self.shown)


def place(page: str) -> Path:
    return ROOT / "docs" / f"{page}.md"


def snippets(page: str) -> list[Snippet]:
    """The Python of a page, in order."""
    return [Snippet.of(match) for match in SNIPPET.finditer(place(page).read_text(encoding="utf-8"))]


def commands(page: str) -> list[tuple[str, str]]:
    """The arguments of the commands of a page, and the outputs that it shows."""
    return COMMAND.findall(place(page).read_text(encoding="utf-8"))


def run(code: str, names: dict[str, Any]) -> str:
    """What the code prints. A line `expression  # [2, 3]` claims a shape."""
    lines = code.splitlines(keepends=True)
    linecache.cache["/model.py"] = (len(code), None, lines, "/model.py")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for statement in ast.parse(code).body:
            exec(compile(ast.Module([statement], []), "/model.py", "exec"), names)
            if claim := SHAPE.match(lines[statement.lineno - 1].rstrip()):
                assert str(list(eval(claim[1], names).shape)) == claim[2], claim[1]
    return out.getvalue()


def settled(text: str) -> str:
    """The text without the times in it and the widths of columns, which follow from them."""
    text = re.sub(r"\b\d[\d.]* (?=(?:µs|ms|s)\b)", "# ", text)
    return re.sub(r"-{3,}", "---", re.sub(r" {2,}", "  ", re.sub(r" +$", "", text, flags=re.M)))


def first_words(text: str) -> list[list[str]]:
    return [line.split()[:1] for line in text.splitlines()]


@contextlib.contextmanager
def namespace(folder: Path) -> Iterator[dict[str, Any]]:
    """For the snippets of a page, which write their files into the folder."""
    transform = psg_fx.transform

    def eager(*args: Any, **options: Any) -> Any:
        if "backend" not in options:
            options = {"backend": "eager"} | {k: v for k, v in options.items() if k != "reuse_outputs"}
        return transform(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(psg_fx, "transform", eager)
        patch.setattr(expr, "_IDS", {})  # factors print in the order in which the process first met them
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
            patch.setenv(name, value)
        yield {"__name__": "__main__"}
    linecache.cache.pop("/model.py", None)


# Both are about Opacus: noise with a seed is for experiments, and images need no gradient.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning", "ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("page", selected(PAGES, set(PAGES) - LONG))
def test_python_runs_and_prints_what_is_shown(page: str, tmp_path: Path) -> None:
    for library in ("transformers", "lightning"):
        if any(f"import {library}" in s.code or f"from {library}" in s.code for s in snippets(page)):
            if importlib.util.find_spec(library) is None:
                pytest.skip(f"{library} is not installed")
            from external.torchvision_import import torchvision  # noqa: F401  (both import it)
    with namespace(tmp_path) as names:
        for snippet in snippets(page):
            if not snippet.is_quoted:
                printed, shown = snippet.compared(run(snippet.code, names))
                assert not PINNED or printed == shown, snippet.code


def write_files(page: str, folder: Path) -> None:
    """The snippets that are files."""
    for snippet in snippets(page):
        if name := re.match(r"# (\w+\.py)\n", snippet.code):
            (folder / name[1]).write_text(snippet.code, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_print_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_files(page, tmp_path)
    for arguments, shown in commands(page):
        assert cli.main(shlex.split(arguments)) == 0, arguments
        printed = capsys.readouterr().out
        assert not shown or first_words(printed) == first_words(shown), arguments


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))


def test_every_command_is_described() -> None:
    (choices,) = [a.choices for a in cli.build_parser()._actions if a.choices]
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `psg-fx (\w+)", page, re.M)) == set(choices)


def test_quoted_rules_are_those_of_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "passes").rglob("*.py"))
    quoted = [s.code for page in PAGES for s in snippets(page) if s.is_quoted]
    assert len(quoted) == 2
    assert all(text in code for text in quoted)


def rewritten(page: str, folder: Path) -> str:
    """The page with the outputs of now, where they differ in what is compared."""

    def python(match: re.Match[str]) -> str:
        snippet, indent = Snippet.of(match), match[1]
        if snippet.is_quoted:
            return match[0]
        output = run(snippet.code, names)
        printed, shown = snippet.compared(output)
        if printed == shown:
            return match[0]
        fence = f"{indent}```"
        return f"{fence}python\n{match[2]}{fence}\n\n{fence}{snippet.kind or 'text'}\n{stripped(output)}{fence}"

    def command(match: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            cli.main(shlex.split(match[1]))
        if not match[2] or first_words(out.getvalue()) == first_words(match[2]):
            return match[0]
        return f"```console\n$ psg-fx {match[1]}\n{stripped(out.getvalue())}```"

    with namespace(folder) as names:
        text = SNIPPET.sub(python, place(page).read_text(encoding="utf-8"))
        write_files(page, folder)
        return COMMAND.sub(command, text)


def stripped(text: str) -> str:
    """Without blanks at the ends of lines."""
    return re.sub(r" +$", "", text, flags=re.M)


def main() -> None:
    """Rewrites the pages named on the command line, or all."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # the shipped tables, whatever was measured on this machine
        for page in sys.argv[1:] or PAGES:
            place(page).write_text(rewritten(page, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
