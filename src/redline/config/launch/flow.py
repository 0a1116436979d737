"""Control flow: if, case, &&, ||, loops, pipelines. What cannot be decided is read in every branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redline.config.launch.conditions import Answer, arithmetic_test, both, either, matches
from redline.config.launch.shell import Scalar
from redline.config.launch.values import Alt, Hole, known, lit, names_of, render, variants

if TYPE_CHECKING:
    from tree_sitter import Node

    from redline.config.launch.run import Reader
    from redline.config.launch.values import Place

MAX_ROUNDS = 128  # of one loop
ALL_GOOD = Answer(True)
Part = Callable[["Reader"], object]
Arms = list[tuple["list[Node]", "list[Node]"]]  # (condition, body)


def if_statement(reader: Reader, node: Node) -> Answer:
    """if, its elifs and its else."""
    arms: Arms = []
    head, body, rest = _arm(node)
    arms.append((head, body))
    otherwise: list[Node] = []
    for child in rest:
        if child.type == "elif_clause":
            arms.append(_arm(child)[:2])
        elif child.type == "else_clause":
            otherwise = child.children
    _arms(reader, arms, otherwise, reader.source.place(node))
    return ALL_GOOD


def _block(nodes: list[Node]) -> Part:
    """The branch that reads these statements."""
    return lambda reader: reader.block(nodes)


def _later(arms: Arms, otherwise: list[Node], place: Place) -> Part:
    """The branch that reads the arms that follow."""
    return lambda reader: _arms(reader, arms, otherwise, place)


def _arms(
    reader: Reader, arms: list[tuple[list[Node], list[Node]]], otherwise: list[Node], place: Place
) -> None:
    possible: list[Part] = []
    names: list[str] = []
    for number, (head, body) in enumerate(arms):
        answer = reader.block(head)
        rest = arms[number + 1 :]
        if answer.value is None:
            possible.append(_block(body))
            names += answer.names
            continue
        if possible:
            if answer.value:
                otherwise = body
                break
            continue
        if answer.value:
            _look(reader, [later for later, _ in rest])
        if answer.value or answer.presumed:
            reader.decide(
                answer,
                _block(body),
                _later(rest, otherwise, place),
                place,
            )
            return
    if not possible:
        reader.block(otherwise)
        return
    if otherwise or len(possible) < 2:  # elif after elif: the script means one of them
        possible.append(_block(otherwise))
    every = tuple(dict.fromkeys(names)) or ("[ ... ]",)
    reader.fork(possible, every, place, decided_by(every))


def _look(reader: Reader, heads: list[list[Node]]) -> None:
    """Tests that are not reached, for the values that they compare a default with."""
    presumed = dict(reader.notes.presumed)
    for head in heads:
        if all(child.type == "test_command" for child in head if child.is_named):
            reader.apart().block(head)
    reader.notes.presumed = presumed


def case_statement(reader: Reader, node: Node) -> Answer:
    """case: the item that matches, or all of them."""
    place = reader.source.place(node)
    named = [child for child in node.children if child.is_named and child.type != "comment"]
    subject = reader.expander.text(named[0]) if named else ()
    items = [_case_item(child) for child in named[1:] if child.type == "case_item"]
    options = variants(subject)
    if options is not None and len(options) == 1:
        for pattern in (pattern for patterns, _ in items for pattern in patterns):
            text = render(reader.expander.text(pattern))
            if not any(character in text for character in "*?["):
                reader.notes.compare_default(subject, text, place)
        for patterns, body in items:
            if any(_fits(reader, options[0], pattern) for pattern in patterns):
                reader.block(body)
                break
        return ALL_GOOD
    possible: list[Part] = []
    complete = False
    for patterns, body in items:
        possible.append(_block(body))
        for pattern in patterns:
            text = render(reader.expander.text(pattern))
            complete = complete or text == "*"
            if not any(character in text for character in "*?["):
                reader.notes.compare(names_of(subject), text, place)
    if not complete and len(possible) < 2:
        possible.append(_nothing)
    names = names_of(subject)
    if possible:
        reader.fork(possible, names, place, decided_by(names))
    return ALL_GOOD


def _fits(reader: Reader, value: str, pattern: Node) -> bool:
    text = known(
        reader.expander.raw(pattern) if pattern.type == "extglob_pattern" else reader.expander.text(pattern)
    )
    return text is not None and matches(value, text)


def list_statement(reader: Reader, node: Node) -> Answer:
    """a && b, a || b."""
    parts = [child for child in node.children if child.type not in ("comment", "\n")]
    if len(parts) != 3:
        return reader.block(node.children)
    first, operator, second = parts
    answer = reader.statement(first)
    if reader.shell.dead:
        return answer
    is_and = operator.type == "&&"
    later = Answer(None, answer.names)

    def follow(reader: Reader) -> None:
        nonlocal later
        later = reader.statement(second)

    if answer.value is None or answer.presumed:
        yes, no = (follow, _nothing) if is_and else (_nothing, follow)
        reader.decide(answer, yes, no, reader.source.place(node))
    elif answer.value == is_and:
        follow(reader)
    elif not is_and:
        _aside(reader, second)
    if is_and:
        return both(answer, later) if answer.value is not False else answer
    return either(answer, later) if answer.value is not True else answer


def _aside(reader: Reader, node: Node) -> None:
    """Look at what runs only after a failure, for the commands in it."""
    reader.apart().statement(node)


def negated(reader: Reader, node: Node) -> Answer:
    """! command."""
    return reader.block([child for child in node.children if child.is_named]).negated()


def pipeline(reader: Reader, node: Node) -> Answer:
    """a | b: each side in a subshell of its own."""
    answer = ALL_GOOD
    for child in node.children:
        if child.is_named:
            answer = _apart(reader, child)
    return answer


def _apart(reader: Reader, node: Node) -> Answer:
    return reader.apart().statement(node)


def subshell(reader: Reader, node: Node) -> Answer:
    """( ... )."""
    return reader.apart().block(node.children)


def for_statement(reader: Reader, node: Node) -> Answer:
    """for x in words."""
    place = reader.source.place(node)
    named = [child for child in node.children if child.is_named and child.type != "comment"]
    if len(named) < 2:
        return ALL_GOOD
    name, body = reader.source.text(named[0].start_byte, named[0].end_byte), named[-1]
    words = reader.expander.words(named[1:-1])
    if not any(child.type == "in" for child in node.children):
        words = list(reader.shell.args or ())
    if name in reader.notes.pinned:
        words = [lit(reader.notes.pinned[name], place)]
        reader.notes.asked.add(name)
    before = reader.shell.loops
    reader.shell.loops = (*before, (name, tuple(words), place))
    for word in words[:MAX_ROUNDS]:
        value = (Hole(word.names, word.place, word.why),) if isinstance(word, Alt) else word
        reader.shell.set(name, Scalar(value), reader.notes)
        if _round(reader, body):
            break
    reader.shell.loops = before
    return ALL_GOOD


def _round(reader: Reader, body: Node) -> bool:
    """One round of a loop; whether it was the last."""
    reader.statement(body)
    ended, reader.shell.dead = reader.shell.dead, ""
    if ended in ("exit", "return"):
        reader.shell.dead = ended
    return ended not in ("", "continue")


def while_statement(reader: Reader, node: Node) -> Answer:
    """while and until: as often as the condition is known to hold, once when it is not known."""
    named = [child for child in node.children if child.is_named and child.type != "comment"]
    if len(named) < 2:
        return ALL_GOOD
    wanted = node.children[0].type != "until"
    for _ in range(MAX_ROUNDS):
        answer = reader.block(named[:-1])
        if answer.value is None:
            reader.fork(
                [lambda reader: _round(reader, named[-1]), _nothing],
                answer.names,
                reader.source.place(node),
                "a loop whose condition cannot be known.",
            )
            break
        if answer.value != wanted or _round(reader, named[-1]):
            break
    return ALL_GOOD


def c_for(reader: Reader, node: Node) -> Answer:
    """for ((a; b; c))."""
    body = next((child for child in node.children if child.type in ("do_group", "compound_statement")), None)
    if body is None:
        return ALL_GOOD
    start = reader.source.data.find(b"((", node.start_byte, body.start_byte) + 2
    end = reader.source.data.rfind(b"))", start, body.start_byte)
    cuts = [
        start - 1,
        *(child.start_byte for child in node.children if child.type == ";" and child.end_byte <= end),
    ]
    if len(cuts) < 3 or end < start:
        return ALL_GOOD
    bounds = [(cuts[0] + 1, cuts[1]), (cuts[1] + 1, cuts[2]), (cuts[2] + 1, end)]
    arithmetic_test(node, reader.expander, *bounds[0])
    for _ in range(MAX_ROUNDS):
        reader.notes.spend(reader.source.place(node))
        text = reader.source.text(*bounds[1]).strip()
        answer = arithmetic_test(node, reader.expander, *bounds[1]) if text else ALL_GOOD
        if answer.value is False or _round(reader, body):
            break
        if answer.value is None:
            break
        arithmetic_test(node, reader.expander, *bounds[2])
    return ALL_GOOD


def _arm(node: Node) -> tuple[list[Node], list[Node], list[Node]]:
    """(condition, body, what follows) of an if or elif."""
    head: list[Node] = []
    body: list[Node] = []
    rest: list[Node] = []
    part = head
    for child in node.children:
        if child.type == "then":
            part = body
        elif child.type in ("elif_clause", "else_clause"):
            rest.append(child)
        elif child.is_named:
            part.append(child)
    return head, body, rest


def _case_item(node: Node) -> tuple[list[Node], list[Node]]:
    patterns: list[Node] = []
    body: list[Node] = []
    part = patterns
    for child in node.children:
        if child.type == ")" and part is patterns:
            part = body
        elif child.is_named:
            part.append(child)
    return patterns, body


def decided_by(names: tuple[str, ...]) -> str:
    """Why a text has choices."""
    if len(names) < 2:
        return f"{names[0] if names else 'a command'} decides it."
    return f"{', '.join(names[:3])} decide it."


def _nothing(reader: Reader) -> None:
    """The branch in which nothing happens."""
