"""Reads a script statement by statement, as a shell would, running nothing.

Where a condition is known one branch is read, where it is not every branch is read on a copy and the copies
are joined. Commands are only looked at: builtins that set variables act, shells that are handed text (`eval`,
`bash -c`, `sbatch <<EOF`) have it parsed and read, scripts that lie beside this one are read where they are
called or sourced, and every command line is noted for the search of the training command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redline.config.launch import flow
from redline.config.launch.bash import Source, source_of_file, source_of_text
from redline.config.launch.builtins import assign_words, declare, note_assignments, read_directives
from redline.config.launch.calls import hand_over
from redline.config.launch.conditions import (
    Answer,
    arithmetic_test,
    test_command,
    words_test,
)
from redline.config.launch.expand import Expander
from redline.config.launch.nearby import beside
from redline.config.launch.shell import Command, Function, Notes, Shell, StopError, join, segments
from redline.config.launch.values import (
    Alt,
    Items,
    Lit,
    Place,
    Text,
    known,
    lit,
    render,
)
from redline.config.launch.vocabulary import QUESTIONS
from redline.errors import DataError

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_DEPTH = 32  # statements within statements
MAX_CALLS = 12  # functions within functions, scripts within scripts
MAX_BRANCHES = 48  # of one condition that are read side by side
MAX_COMMANDS = 200  # that are noted
WRAPPING = frozenset({"program", "do_group", "compound_statement", "else_clause", "ERROR"})
ALL_GOOD = Answer(True)


@dataclass(slots=True)
class Reader:
    """Reads one source in one shell."""

    source: Source
    shell: Shell
    notes: Notes
    depth: int = 0
    calls: int = 0

    @property
    def expander(self) -> Expander:
        """The expander of words here."""
        return Expander(self.source, self.shell, self.notes)

    def program(self) -> None:
        """Read the whole source."""
        read_directives(self.source, self.notes)
        note_assignments(self.source, self.notes)
        self.block(self.source.parse().children)

    def block(self, nodes: list[Node]) -> Answer:
        """Statements in order, until one leaves; the answer of the last."""
        answer = ALL_GOOD
        for node in nodes:
            if self.shell.dead:
                break
            if node.is_named and node.type != "comment":
                answer = self.statement(node)
        return answer

    def statement(self, node: Node) -> Answer:
        """One statement; the answer is its exit status as a condition."""
        self.notes.spend(self.source.place(node))
        if self.depth > MAX_DEPTH:
            return Answer(None, ("nested too deeply",))
        self.depth += 1
        try:
            return self._statement(node)
        finally:
            self.depth -= 1

    def _statement(self, node: Node) -> Answer:
        handler = HANDLERS.get(node.type)
        if handler is not None:
            return handler(self, node)
        if node.type == "compound_statement" and self.source.data.startswith(b"((", node.start_byte):
            return arithmetic_test(node, self.expander, node.start_byte + 2, node.end_byte - 2)
        if node.type in WRAPPING:
            return self.block(node.children)
        return ALL_GOOD

    # Branches

    def apart(self) -> Reader:
        """A reader of the same source in a copy of the shell."""
        return Reader(self.source, self.shell.copy(), self.notes, self.depth, self.calls)

    def fork(
        self, parts: list[Callable[[Reader], object]], names: tuple[str, ...], place: Place, why: str
    ) -> None:
        """Read each part on its own copy of the shell and join what comes out."""
        branches = []
        for part in parts[:MAX_BRANCHES]:
            copy = self.shell.copy()
            copy.conditions = tuple(dict.fromkeys((*copy.conditions, *names)))
            part(Reader(self.source, copy, self.notes, self.depth, self.calls))
            branches.append(copy)
        join(self.shell, branches, names, place, why)

    def decide(
        self, answer: Answer, yes: Callable[[Reader], object], no: Callable[[Reader], object], place: Place
    ) -> None:
        """Read the branch that an answer selects, or both."""
        if answer.value is None:
            self.fork([yes, no], answer.names, place, flow.decided_by(answer.names))
            return
        chosen, other = (yes, no) if answer.value else (no, yes)
        if not answer.presumed:
            chosen(self)
            return
        copy = self.shell.copy()
        chosen(Reader(self.source, copy, self.notes, self.depth, self.calls))
        if copy.dead == "exit":  # only a usage message: the script as meant takes the other way
            other(self)
        else:
            self.shell.become(copy)

    # Assignments and functions

    def assignment(self, node: Node) -> Answer:
        """a=b, a+=b, a[i]=b, a=(...)."""
        assign_words(node, self.expander)
        return ALL_GOOD

    def assignments(self, node: Node) -> Answer:
        """a=1 b=2."""
        return self.block(node.children)

    def declaration(self, node: Node) -> Answer:
        """export, declare, local, readonly, typeset."""
        declare(node, self.expander)
        return ALL_GOOD

    def unset(self, node: Node) -> Answer:
        """unset."""
        for word in self.expander.words(child for child in node.children if child.is_named):
            name = known(word) if not isinstance(word, Alt) else None
            if name:
                self.shell.variables.pop(name, None)
                self.shell.exported.discard(name)
        return ALL_GOOD

    def function(self, node: Node) -> Answer:
        """name() { ... }."""
        name = next((child for child in node.children if child.type == "word"), None)
        body = node.children[-1] if node.children else None
        if name is not None and body is not None:
            label = self.source.text(name.start_byte, name.end_byte)
            self.shell.functions[label] = Function(self.source, body)
        return ALL_GOOD

    def test(self, node: Node) -> Answer:
        """[ ... ] and [[ ... ]]."""
        return test_command(node, self.expander)

    # Commands

    def redirected(self, node: Node) -> Answer:
        """A command with redirections; the body of a heredoc is its input, or a file that it writes."""
        body = next(
            (child for child in node.children if child.is_named and "redirect" not in child.type), None
        )
        given = self.expander.given(node)
        if body is None:
            return ALL_GOOD
        if given is not None and body.type == "command":
            return self.command(body, given, self._target(node))
        return self.statement(body)

    def _target(self, node: Node) -> Text | None:
        """The file that a redirection writes."""
        stack = list(node.children)
        while stack:
            child = stack.pop()
            if child.type == "heredoc_redirect":
                stack += child.children
            elif child.type == "file_redirect" and any(
                part.type in (">", ">>", ">|") for part in child.children
            ):
                return self.expander.text(child.children[-1])
        return None

    def command(self, node: Node, given: Text | None = None, target: Text | None = None) -> Answer:
        """One command line."""
        inline: dict[str, tuple[Text, Place]] = {}
        words: list[Node] = []
        for child in node.children:
            if child.type == "variable_assignment" and not words:
                name, value = assign_words(child, self.expander, only_value=True)
                if name:
                    inline[name] = (value, self.source.place(child))
            elif child.type == "herestring_redirect" and given is None and child.children:
                given = self.expander.text(child.children[-1])
            elif child.is_named and "redirect" not in child.type and child.type != "comment":
                words.append(child)
        if not words:
            return ALL_GOOD
        if self.source.text(words[0].start_byte, words[0].end_byte) == "test":
            return words_test(words[1:], self.expander, self.source.place(node))
        items = tuple(self.expander.words(words))
        if self.source.data.startswith(b"--", words[0].start_byte):  # a continued line that was not continued
            self.notes.cut_off.setdefault(self.source.place(node), items)
            return Answer(False)
        return self.call(items, inline, self.source.place(node), given, target)

    def call(
        self,
        items: Items,
        inline: dict[str, tuple[Text, Place]],
        place: Place,
        given: Text | None = None,
        target: Text | None = None,
    ) -> Answer:
        """A command line after expansion."""
        self.notes.spend(place)
        first = next((known(item) for item in items if not isinstance(item, Alt)), None) if items else None
        if first in self.shell.functions:
            return self._function(self.shell.functions[first], items[1:], place)
        answer = hand_over(self, first, items, inline, place, given, target)
        if answer is not None:
            return answer
        if _may_train(items) and len(self.notes.commands) < MAX_COMMANDS:
            shell = self.shell.copy()
            self.notes.commands.append(
                Command((*shell.prefix, *items), shell, {**shell.around, **inline}, place)
            )
        return Answer(True) if first not in QUESTIONS else Answer(None, (f"{first} ...",))

    def _function(self, function: Function, items: Items, place: Place) -> Answer:
        if self.calls >= MAX_CALLS:
            return Answer(None, ("a function calls itself",))
        self.notes.spend(place)
        before, outer = self.shell.args, self.shell.variables
        self.shell.args = items
        names_before = self.shell.local_names
        self.shell.variables, self.shell.local_names = dict(outer), frozenset()
        reader = Reader(function.source, self.shell, self.notes, self.depth, self.calls + 1)
        answer = reader.statement(function.body)
        for name in self.shell.local_names:
            if name in outer:
                self.shell.variables[name] = outer[name]
            else:
                self.shell.variables.pop(name, None)
        self.shell.local_names = names_before
        self.shell.args = before
        if self.shell.dead == "return":
            self.shell.dead = ""
        return answer

    def read_text(self, text: Text, place: Place, args: Items | None = None, *, apart: bool) -> None:
        """Read a text that is handed to a shell: this one (eval) or another."""
        if self.calls >= MAX_CALLS:
            return
        shell = self._child(args) if apart else self.shell
        source = source_of_text(text, place.file)
        Reader(source, shell, self.notes, self.depth, self.calls + 1).program()
        if not apart and self.shell.dead == "return":
            self.shell.dead = ""

    def _child(self, args: Items | None) -> Shell:
        """The shell that a new process would be: exported variables, no functions."""
        shell = self.shell.copy()
        shell.args = args if args is not None else ()
        return shell

    def read_script(self, name: Text, args: Items, place: Place, *, sourced: bool) -> bool:
        """Read a script that lies beside this one, or that a heredoc wrote; whether there is one."""
        written = self.shell.files.get(render(name))
        if written is not None:
            self.read_text(written, place, args or self.shell.args if sourced else args, apart=not sourced)
            return True
        path = beside(name, self.notes)
        if path is None:
            if sourced:
                self.notes.skipped.setdefault(render(name), (place, "it is not beside the script."))
            return False
        if self.calls >= MAX_CALLS or path.resolve() in self.notes.open_files:
            return True
        try:
            source, text = source_of_file(path)
        except DataError as exc:
            self.notes.skipped.setdefault(render(name), (place, exc.why))
            return sourced
        self.notes.look_at_line_ends(path, text)
        shell = self.shell if sourced else self._child(args)
        kept = shell.args
        shell.args = args if args else kept
        self.notes.open_files.append(path.resolve())
        try:
            Reader(source, shell, self.notes, self.depth, self.calls + 1).program()
        finally:
            self.notes.open_files.pop()
        shell.args = kept
        if sourced and shell.dead == "return":
            shell.dead = ""
        return True


def _may_train(items: Items) -> bool:
    """Whether a command names a Python program or module."""
    return any(
        isinstance(segment, Lit) and (".py" in segment.text or segment.text == "-m")
        for segment in segments(items)
    )


Handler = Callable[[Reader, "Node"], Answer]
HANDLERS: dict[str, Handler] = {
    "if_statement": flow.if_statement,
    "case_statement": flow.case_statement,
    "list": flow.list_statement,
    "negated_command": flow.negated,
    "pipeline": flow.pipeline,
    "subshell": flow.subshell,
    "for_statement": flow.for_statement,
    "while_statement": flow.while_statement,
    "c_style_for_statement": flow.c_for,
    "variable_assignment": Reader.assignment,
    "variable_assignments": Reader.assignments,
    "declaration_command": Reader.declaration,
    "unset_command": Reader.unset,
    "function_definition": Reader.function,
    "test_command": Reader.test,
    "redirected_statement": Reader.redirected,
    "command": Reader.command,
}


def read_program(source: Source, notes: Notes) -> Shell:
    """Read a script from its beginning; returns the shell at its end. It ends, whatever the script says."""
    shell = Shell(lit(str(notes.script.absolute()), Place(source.file, 1)))
    start = Place(source.file, 1)
    notes.open_files.append(notes.script.resolve())
    try:
        Reader(source, shell, notes).program()
    except StopError:
        pass
    except RecursionError:
        notes.stopped = notes.stopped or start
    return shell
