"""The English of docstrings, comments and pages: its words, and how often a word is among them."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

QUESTION = re.compile(r"(What|Where|How|Which|Whether|Who|When)\b")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"`[^`]*`|^>>>.*$|^ +\*{0,2}\w+:(?= )", re.MULTILINE)
"""Code in a line, examples, and names of arguments."""
_DRAWN = re.compile(r"[─│┌└├┬┴┤┐┘▶◀]|\S\s{3,}\S")
"""Lines of a picture, and of a list in columns."""


def words_of(path: Path) -> list[str]:
    """Return the words of a file's prose, in lower case and in order, without code."""
    texts = page_texts(path) if path.suffix == ".md" else [*docstrings(path), *comments(path)]
    return [word.lower() for text in texts for word in _WORD.findall(without_code(text))]


def without_code(text: str) -> str:
    """Return a text without code and pictures."""
    lines = [line for line in text.splitlines() if not _DRAWN.search(line)]
    return _CODE.sub(" ", "\n".join(lines))


def page_texts(path: Path) -> Iterator[str]:
    """Yield the headings, paragraphs and cells of tables of a page; fenced blocks are left out."""
    for token in MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8")):
        if token.type == "inline":
            yield "".join(child.content for child in token.children if child.type == "text") + "\n"


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file, its own first, and the texts below attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield from (text for number in range(len(body)) if (text := _text_at(body, number)) is not None)


def _text_at(body: list[ast.AST], number: int) -> str | None:
    """Return the docstring that a statement is; None for other statements."""
    match body[number]:
        case ast.Expr(value=ast.Constant(value=str(text))):
            documents = number == 0 or isinstance(body[number - 1], ast.Assign | ast.AnnAssign)
            return inspect.cleandoc(text) if documents else None
    return None


def comments(path: Path) -> Iterator[str]:
    """Yield the comments of a file, each line by itself; directives for tools are left out."""
    source = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        if token.type == tokenize.COMMENT and not re.match(r"#!|# ?(type:|noqa|mypy:|pragma)", token.string):
            yield token.string.lstrip("# ")


def opens_with_a_question(path: Path) -> bool:
    """Return True if a file's first words are a question word, as in "What a rank does"."""
    source = path.read_text(encoding="utf-8")
    first = source.lstrip("# \n") if path.suffix == ".md" else ast.get_docstring(ast.parse(source)) or ""
    return QUESTION.match(first) is not None


def rate(words: list[str], word: str) -> float:
    """Return how often a word is among 1,000 words."""
    return 1000 * words.count(word) / max(1, len(words))
