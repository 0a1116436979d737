"""A page as its reader sees it: elements, attributes, texts and the numbers behind them. Checks nesting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img"}


@dataclass
class Node:
    """An element and what stands in it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    inside: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything written inside, white space as single blanks."""
        parts = [each if isinstance(each, str) else each.text for each in self.inside]
        return " ".join("".join(parts).split())

    def all(self, tag: str = "", **attributes: str) -> list[Node]:
        """Elements inside by tag and attributes (class_ matches one of its words)."""
        return [each for each in self._every() if each._is(tag, attributes)]

    def one(self, tag: str = "", **attributes: str) -> Node:
        """The only such element."""
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def numbers(self) -> list[float]:
        """The values of the `data` elements inside."""
        return [float(each.attributes["value"]) for each in self.all("data")]

    def rows(self) -> list[list[str]]:
        """A table's rows of texts, the header among them."""
        cells = ([each for each in row.inside if isinstance(each, Node)] for row in self.all("tr"))
        return [[cell.text for cell in row] for row in cells]

    def _every(self) -> Iterator[Node]:
        for each in self.inside:
            if isinstance(each, Node):
                yield each
                yield from each._every()

    def _is(self, tag: str, attributes: dict[str, str]) -> bool:
        own = self.attributes
        classes = attributes.get("class_")
        plain = {name.replace("_", "-"): value for name, value in attributes.items() if name != "class_"}
        return (
            tag in ("", self.tag)
            and all(own.get(name) == value for name, value in plain.items())
            and (classes is None or classes in own.get("class", "").split())
        )


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack = [Node("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> names an attribute twice: {names}"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.stack[-1].inside.append(node)
        if tag not in VOID:
            self.stack.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack[-1].inside.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        open_tag = self.stack.pop().tag
        assert open_tag == tag, f"</{tag}> closes <{open_tag}> in line {self.getpos()[0]}"

    def handle_data(self, data: str) -> None:
        self.stack[-1].inside.append(data)


def read_page(text: str) -> Node:
    """The document; asserts that its elements close in order."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert [node.tag for node in reader.stack] == [""]
    return reader.stack[0]
