"""Launchers: what torchrun, srun, deepspeed, mpirun and accelerate say of nodes and processes.

A command line is a chain (`srun ... numactl ... torchrun ... pretrain_gpt.py ...`). The last launcher before
the program decides how many processes there are; what it leaves open the ones around it, and the directives
of the batch system, may settle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from redline.config.launch.shell import Command, Notes, Scalar, directive
from redline.config.launch.values import (
    Alt,
    Hole,
    Item,
    Items,
    Lit,
    Place,
    Text,
    cut,
    known,
    render,
    variants,
)

TORCHRUN = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "elastic_launch"})
MPI = frozenset({"mpirun", "mpiexec", "orterun", "prterun", "mpiexec.hydra"})
LAUNCHERS = TORCHRUN | MPI | {"deepspeed", "srun", "accelerate"}
MODULES = TORCHRUN | {"accelerate.commands.launch", "deepspeed.launcher.runner", "deepspeed.launcher.launch"}
TRAINER = re.compile(r"(pretrain|train|finetune|sft|megatron)[^/]*\.py$", re.IGNORECASE)


@dataclass(slots=True)
class Processes:
    """How many processes a command starts; None where that is not known.

    `doubts` says for each fact which holes decide it, `taken` on which taken values it stands.
    """

    launcher: str | None = None
    nnodes: int | None = None
    nproc_per_node: int | None = None
    world_size: int | None = None
    doubts: dict[str, list[Hole]] = field(default_factory=dict)
    taken: dict[str, list[str]] = field(default_factory=dict)


def find_entry(items: Items) -> tuple[int, str] | None:
    """(index, name) of the program that a command line runs: a .py file, or the module after -m."""
    found: list[tuple[int, str]] = []
    before = ""
    for index, item in enumerate(items):
        word = "" if isinstance(item, Alt) else render(item)
        if before == "-m" and word not in MODULES:
            found.append((index, word))
        elif word.endswith(".py") and not word.startswith("-"):
            is_value = before.startswith("--") and "=" not in before  # of an option of the launcher
            if not is_value or TRAINER.search(word):
                found.append((index, word.rpartition("/")[2]))
        elif word.startswith("--") and found:
            break
        before = word
    trainers = [entry for entry in found if TRAINER.search(entry[1]) or "megatron" in entry[1]]
    return next(iter(trainers or found), None)


def processes(command: Command, entry: int, notes: Notes) -> Processes:
    """The processes that a command starts, its program standing at `entry`."""
    readings = [_read(row, command, notes) for row in _rows(command.items[:entry])]
    first = readings[0]
    for other in readings[1:]:
        for fact in ("nnodes", "nproc_per_node", "world_size"):
            if getattr(first, fact) != getattr(other, fact):
                setattr(first, fact, None)
                alts = [item for item in command.items[:entry] if isinstance(item, Alt)]
                first.doubts.setdefault(fact, []).extend(Hole(a.names, a.place, a.why) for a in alts)
    return first


def _rows(items: Items) -> Iterator[list[Text]]:
    """The words before the program, in as many versions as branches of the script differ."""
    widest = max((len(item.streams) for item in items if isinstance(item, Alt)), default=1)
    for number in range(widest):
        row: list[Text] = []
        for item in items:
            row += _stream(item, number) if isinstance(item, Alt) else [item]
        yield row


def _stream(alt: Alt, number: int) -> list[Text]:
    if not alt.streams:
        return []
    row: list[Text] = []
    for item in alt.streams[min(number, len(alt.streams) - 1)]:
        row += _stream(item, number) if isinstance(item, Alt) else [item]
    return row


def _read(row: list[Text], command: Command, notes: Notes) -> Processes:
    words = [render(text) for text in row]
    names = [(index, word.rpartition("/")[2]) for index, word in enumerate(words)]
    marks = [(index, name) for index, name in names if name in LAUNCHERS]
    reader = _Counts(command, notes)
    if not marks:
        reader.alone()
        return reader.found
    for position, (index, name) in reversed(list(enumerate(marks))):
        end = marks[position + 1][0] if position + 1 < len(marks) else len(row)
        options = _options(row[index + 1 : end])
        if reader.found.launcher is None:
            reader.begin(name, options)
        elif name == "srun":
            reader.around(options)
    reader.finish()
    return reader.found


Options = dict[str, Text]


def _options(row: list[Text]) -> Options:
    """Options of a launcher, dashes and underscores alike: {"nproc-per-node": text}."""
    found: Options = {}
    index = 0
    while index < len(row):
        word = render(row[index])
        index += 1
        if not word.startswith("-") or word in ("-", "--"):
            continue
        name, joined, _ = word.partition("=")
        key = name.lstrip("-").replace("_", "-")
        if joined:
            found.setdefault(key, cut(row[index - 1], len(name) + 1))
        elif index < len(row) and not render(row[index]).startswith("-"):
            found.setdefault(key, row[index])
        match = re.fullmatch(r"-([NncG])(\d+)", word)
        if match:
            found.setdefault(match[1], (Lit(match[2], row[index - 1][0].place),))
    return found


class _Counts:
    """Collects the counts of one command line."""

    def __init__(self, command: Command, notes: Notes) -> None:
        self.command, self.notes = command, notes
        self.found = Processes()

    def begin(self, name: str, options: Options) -> None:
        """The launcher that starts the program."""
        found = self.found
        if name in TORCHRUN:
            found.launcher = "torch.distributed.launch" if name.endswith(".launch") else "torchrun"
            found.nnodes = self.count("nnodes", options.get("nnodes"), default=1)
            found.nproc_per_node = self.count("nproc_per_node", options.get("nproc-per-node"), default=1)
        elif name == "deepspeed":
            found.launcher = name
            self._deepspeed(options)
        elif name == "accelerate":
            found.launcher = name
            found.nnodes = self.count("nnodes", options.get("num-machines"), default=1)
            found.world_size = self.count("world_size", options.get("num-processes"))
        elif name in MPI:
            found.launcher = "mpirun"
            self._mpi(options)
        else:
            found.launcher = "srun"
            self.around(options)

    def _deepspeed(self, options: Options) -> None:
        found = self.found
        include = known(options.get("include") or options.get("i") or ()) or ""
        if ":" in include and "@" not in include:
            found.nnodes = 1
            found.nproc_per_node = len([gpu for gpu in include.partition(":")[2].split(",") if gpu])
            return
        has_hosts = "hostfile" in options or "H" in options
        found.nnodes = self.count("nnodes", options.get("num-nodes"), default=None if has_hosts else 1)
        found.nproc_per_node = self.count("nproc_per_node", options.get("num-gpus"))
        if options.get("num-gpus") is None:
            self._by_gpus("deepspeed without --num_gpus")
        if has_hosts and options.get("num-nodes") is None:
            self.doubt("nnodes", "the hostfile", "deepspeed takes the nodes of its hostfile.")

    def _mpi(self, options: Options) -> None:
        found = self.found
        total = next((options[key] for key in ("np", "n", "c") if key in options), None)
        each = next((options[key] for key in ("npernode", "ppn", "N", "perhost") if key in options), None)
        mapped = re.search(r"ppr:(\d+):node", render(options.get("map-by") or ()))
        found.world_size = self.count("world_size", total)
        found.nproc_per_node = int(mapped[1]) if mapped else self.count("nproc_per_node", each)
        hosts = known(options.get("H") or options.get("host") or ())
        if hosts:
            counts = [part.partition(":")[2] for part in hosts.split(",") if part]
            found.nnodes = len(counts)
            if found.nproc_per_node is None and all(count.isdecimal() for count in counts):
                found.nproc_per_node = int(counts[0]) if len(set(counts)) == 1 else None

    def around(self, options: Options) -> None:
        """srun, alone or around another launcher, with the directives of the batch script."""
        found = self.found
        nodes = options.get("nodes") or options.get("N")
        tasks = options.get("ntasks") or options.get("n")
        each = options.get("ntasks-per-node")
        if found.launcher != "srun":
            return
        found.nnodes = self.count("nnodes", nodes) if nodes else self.directive("nodes", "nnodes")
        found.nproc_per_node = (
            self.count("nproc_per_node", each)
            if each
            else self.directive("ntasks-per-node", "nproc_per_node")
        )
        found.world_size = self.count("world_size", tasks) if tasks else None
        if found.world_size is None and not tasks and found.nproc_per_node is None:
            found.world_size = self.directive("ntasks", "world_size")
        nothing = each is None and tasks is None and not self.notes.directives
        if found.nproc_per_node is None and found.world_size is None and each is None and tasks is None:
            if nothing:
                self.doubt(
                    "world_size",
                    "SLURM_NTASKS",
                    "srun starts what sbatch asked for, and no #SBATCH line says how many.",
                )
            elif "ntasks-per-node" not in self.notes.directives:
                found.nproc_per_node = 1  # Slurm starts one task a node

    def alone(self) -> None:
        """No launcher: the platform sets WORLD_SIZE, or there is one process."""
        found = self.found
        found.launcher = "python"
        for name in ("WORLD_SIZE", "SLURM_NTASKS"):
            value = self._exported(name)
            if value is not None:
                found.world_size = self.count("world_size", value)
                return
        found.nnodes = found.nproc_per_node = found.world_size = 1

    def _exported(self, name: str) -> Text | None:
        if name in self.command.inline:
            return self.command.inline[name][0]
        value = self.command.shell.variables.get(name)
        if name in self.command.shell.exported and isinstance(value, Scalar):
            return value.text
        return None

    def finish(self) -> None:
        """What follows from two of the three numbers."""
        found = self.found
        if found.world_size is None and found.nnodes and found.nproc_per_node:
            found.world_size = found.nnodes * found.nproc_per_node
        elif found.world_size and found.nproc_per_node and not found.nnodes:
            found.nnodes = max(found.world_size // found.nproc_per_node, 1)
        elif found.world_size and found.nnodes and not found.nproc_per_node:
            found.nproc_per_node = found.world_size // found.nnodes
        if found.world_size is None:
            for fact in ("nnodes", "nproc_per_node"):
                self.found.doubts.setdefault("world_size", []).extend(self.found.doubts.get(fact, []))

    def count(self, fact: str, text: Text | None, *, default: int | None = None) -> int | None:
        """A number that an option gives; a hole in it is remembered as a doubt of the fact."""
        if text is None:
            return default
        options = variants(text)
        self.found.taken.setdefault(fact, []).extend(
            segment.taken for segment in text if isinstance(segment, Lit) and segment.taken
        )
        if options is None or len(options) != 1:
            self.found.doubts.setdefault(fact, []).extend(s for s in text if isinstance(s, Hole))
            return None
        low, _, high = options[0].strip().partition(":")
        if fact == "nnodes" and high and low != high:
            self.doubt(fact, f"--nnodes {options[0]}", "the number of nodes is elastic.")
            return None
        if low.isdecimal() and len(low) < 8 and int(low) > 0:
            return int(low)
        if low in ("gpu", "auto", "cuda"):
            self._by_gpus(f"--nproc_per_node {low}")
            return self.found.nproc_per_node
        self.doubt(fact, render(text), "it is no number.")
        return None

    def _by_gpus(self, name: str) -> None:
        """One process a visible GPU."""
        visible = known(self._exported("CUDA_VISIBLE_DEVICES") or ())
        if visible:
            self.found.nproc_per_node = len([gpu for gpu in visible.split(",") if gpu.strip()])
            return
        self.found.nproc_per_node = self.directive("gpus-per-node", "nproc_per_node")
        if self.found.nproc_per_node is None:
            self.doubt("nproc_per_node", name, "it starts a process for every GPU of the machine.")

    def directive(self, key: str, fact: str) -> int | None:
        """A number of the #SBATCH lines, remembered as taken."""
        stated = directive(key, self.notes)
        if stated is None:
            return None
        value, place = stated
        if not value.isdecimal() or len(value) > 7 or int(value) == 0:
            self.doubt(fact, f"#SBATCH --{key}", f"{value} is no number.", place)
            return None
        taken = self.notes.take_directive(key, value, place)
        self.found.taken.setdefault(fact, []).extend(s.taken for s in taken if isinstance(s, Lit) and s.taken)
        return int(value)

    def doubt(self, fact: str, name: str, why: str, place: Place | None = None) -> None:
        """Remember why a fact is not known."""
        hole = Hole((name,), place or self.command.place, why)
        self.found.doubts.setdefault(fact, []).append(hole)


def exported(command: Command, entry: int) -> dict[str, tuple[Text, Place]]:
    """Variables of the environment that a command gives its program."""
    shell = command.shell
    found: dict[str, tuple[Text, Place]] = {}
    for name in sorted(shell.exported):
        value = shell.variables.get(name)
        if isinstance(value, Scalar):
            place = value.text[0].place if value.text else command.place
            found[name] = (value.text, place)
    found |= command.inline
    for item in command.items[:entry]:
        found |= _assigned(item)
    return found


def _assigned(item: Item) -> dict[str, tuple[Text, Place]]:
    """NAME=text among the words of a launcher: env, mpirun -x, srun --export."""
    if isinstance(item, Alt) or not item:
        return {}
    shown = render(item)
    if shown.startswith("--export="):
        pairs = [part.partition("=") for part in shown[9:].split(",")]
        place = item[0].place
        return {name: ((Lit(value, place),), place) for name, joined, value in pairs if joined and value}
    match = re.match(r"([A-Z_][A-Z0-9_]*)=", shown)
    return {match[1]: (cut(item, match.end()), item[0].place)} if match else {}
