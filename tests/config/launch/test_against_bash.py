"""The reading against bash itself: the words of a command are the very words that bash would pass.

Each snippet ends in a command `probe pretrain_gpt.py WORDS`. bash runs it with a function of that name that
prints its words; the reading must know every word without running anything.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline.config.launch.bash import Source
from redline.config.launch.run import read_program
from redline.config.launch.shell import Notes
from redline.config.launch.values import Alt, known

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="there is no bash to compare with")
PROBE = "probe() { printf '%s\\0' \"$@\"; }\n"


def bash_words(snippet: str) -> list[list[str]]:
    """The words of every probe, by bash; each probe begins with pretrain_gpt.py."""
    assert BASH is not None
    ran = subprocess.run(
        [BASH, "-c", PROBE + snippet, "script"], capture_output=True, timeout=20, env={"LC_ALL": "C.UTF-8"}
    )
    words = ran.stdout.decode("utf-8", "replace").split("\0")[:-1]
    rows: list[list[str]] = []
    for word in words:
        if word == "pretrain_gpt.py":
            rows.append([])
        rows[-1].append(word)
    return rows


def read_words(snippet: str) -> list[list[str | None]]:
    """The same by the reading; None for a word that is not known."""
    notes = Notes({}, Path("script"))
    read_program(Source(Path("script"), snippet.encode()), notes)
    return [
        [None if isinstance(item, Alt) else known(item) for item in command.items[1:]]
        for command in notes.commands
    ]


SNIPPETS = {
    "words": "probe pretrain_gpt.py a 'b c' \"d e\" f\\ g --x=1 '' \"\"",
    "variables": 'A=1; B="x y"; probe pretrain_gpt.py $A $B "$B" ${A}b "$A$B" \'$A\' \\$A',
    "continuation": 'probe pretrain_gpt.py \\\n  --a 1 \\\n  --b "2 \\\n3"',
    "comment": "A=(--x 1 # one\n  --y 2\n  # all of it\n) # end\nprobe pretrain_gpt.py ${A[@]} # more",
    "defaults": 'E=; probe pretrain_gpt.py ${N:-d} ${E:-d} "${E-d}" ${N-d} "${N:-a b}" ${N:-a b} ${E:+set} ${N+set}',
    "default of default": 'A=q; probe pretrain_gpt.py ${N:-${M:-$A}} ${N:-"$A z"} ${N:=kept} $N ${N}',
    "assign by colon": ': ${N:=5} "${M:=x y}"; probe pretrain_gpt.py $N "$M"',
    "alternate": "A=1; probe pretrain_gpt.py ${A:+--flag $A} ${B:+--no}",
    "suffix": "A=a/b/c.tar.gz; probe pretrain_gpt.py ${A%.*} ${A%%.*} ${A#*/} ${A##*/} ${A%c*} ${A%none}",
    "replace": 'A=1_000_0; probe pretrain_gpt.py ${A//_} ${A/_/-} ${A//0/oo} ${A//_/ } "${A//_/ }"',
    "slice": "A=abcdef; probe pretrain_gpt.py ${A:2} ${A:1:2} ${A: -2} ${A:0:$((1+1))}",
    "case": "A=MiXed; probe pretrain_gpt.py ${A,,} ${A^^} ${A^} ${A,}",
    "length": "A=abc; B=(1 2 3); probe pretrain_gpt.py ${#A} ${#B[@]} ${#B}",
    "indirect": "X=5; N=X; probe pretrain_gpt.py ${!N}",
    "array": 'A=(a "b c" d); A+=(e); probe pretrain_gpt.py ${A[@]} "${A[@]}" "${A[*]}" ${A[1]} "${A[1]}" ${A[-1]} $A',
    "array slice": 'A=(a b c d); probe pretrain_gpt.py "${A[@]:1:2}" "${A[@]:2}"',
    "array by index": "A[0]=x; A[1]=y; i=1; A[i]=z; probe pretrain_gpt.py ${A[@]} ${A[$i]} ${A[i]}",
    "empty array": 'A=(); probe pretrain_gpt.py "${A[@]}" ${A[@]} end "x${A[@]}"',
    "array of strings": 'A=("--a 1" "--b 2"); probe pretrain_gpt.py ${A[@]} "${A[@]}"',
    "nested arrays": 'A=(1 2); B=(0 "${A[@]}" 3); B=("${B[@]}" 4); probe pretrain_gpt.py "${B[@]}"',
    "table": 'declare -A T=([a]=1 [b]="2 3"); T[c]=4; k=b; probe pretrain_gpt.py "${T[a]}" "${T[$k]}" ${T[c]}',
    "text from array": 'A=(1 2); S="${A[@]} 3"; probe pretrain_gpt.py $S "$S"',
    "append": 'S="--a"; S+=" --b 1"; S="$S --c"; probe pretrain_gpt.py $S',
    "arithmetic": "A=7; probe pretrain_gpt.py $((A*2+1)) $(( A / 2 )) $(( -A % 4 )) $((2**10)) $((A>3 ? 10 : 20)) $((0x1f))",
    "arithmetic text": 'A=3; B="A*2"; probe pretrain_gpt.py $(($A + 1)) $((${A}+${A})) $[A+1] $((1<<4|1)) $((!A)) $((~A))',
    "arithmetic side": "n=0; i=1; j=$((i++ + ++i)); ((k=j*2)); let m=k+1; probe pretrain_gpt.py $i $j $k $m $((n+=5)) $n",
    "if": "A=2; if [ $A -eq 2 ]; then B=two; else B=other; fi; if [[ $A == 3 ]]; then B=no; fi; probe pretrain_gpt.py $B",
    "elif": "A=b; if [ $A = a ]; then R=1; elif [ $A = b ]; then R=2; else R=3; fi; probe pretrain_gpt.py $R",
    "test forms": 'A=; B=x; R=; [ -z "$A" ] && R=${R}1; [ -n "$B" ] && R=${R}2; test "$B" = x && R=${R}3; '
    '[[ -z $A && $B != y ]] && R=${R}4; [ "$B" = x -a -z "$A" ] && R=${R}5; [ ! -z "$B" ] && R=${R}6; '
    "[[ ( $B == x || $B == y ) && ! $A ]] && R=${R}7; (( 3 > 2 )) && R=${R}8; probe pretrain_gpt.py $R",
    "patterns": 'A=llama-7b; R=; [[ $A == llama-* ]] && R=1; [[ $A == "llama-*" ]] || R=${R}2; [[ $A =~ ^llama ]] && R=${R}3; '
    "probe pretrain_gpt.py $R",
    "or": "A=1; [ $A = 2 ] || B=set; false || C=set; true && D=set; probe pretrain_gpt.py $B $C $D",
    "negation": "A=1; if ! [ $A = 2 ]; then B=yes; fi; if [ ! $A = 1 ]; then B=no; fi; probe pretrain_gpt.py $B",
    "case statement": "A=13B; case $A in 7B|8B) N=32;; 13*) N=40;; *) N=0;; esac; probe pretrain_gpt.py $N",
    "case quoted": "A='x y'; case \"$A\" in x) N=1;; 'x y') N=2;; esac; probe pretrain_gpt.py $N",
    "for": 'S=; for i in 1 2 3; do S="$S $i"; done; for j in {4..6}; do S+=" $j"; done; probe pretrain_gpt.py $S',
    "for array": 'A=(x "y z"); S=(); for i in "${A[@]}"; do S+=("<$i>"); done; probe pretrain_gpt.py "${S[@]}"',
    "for c": "S=; for ((i=0; i<4; i++)); do [ $i -eq 2 ] && continue; S+=$i; done; probe pretrain_gpt.py $S",
    "while": "i=0; while [ $i -lt 5 ]; do i=$((i+1)); if [ $i = 3 ]; then break; fi; done; until ((i>6)); do ((i++)); done; "
    "probe pretrain_gpt.py $i",
    "several": "for tp in 1 2; do probe pretrain_gpt.py --tp $tp; done",
    "function": 'f() { local a=$1; b="$2"; shift; rest="$*"; count=$#; }; a=keep; f 1 "2 3" 4; probe pretrain_gpt.py $a "$b" "$rest" $count',
    "function words": 'f() { probe pretrain_gpt.py "$@" end; }; f 1 "2 3"; g() { f "$1" ${2:-two}; }; g x',
    "function default": "function f { :; X=${1:-none}; }; f; probe pretrain_gpt.py $X; f y; probe pretrain_gpt.py $X",
    "return": "f() { X=1; return 0; X=2; }; f; probe pretrain_gpt.py $X",
    "eval": "C='probe pretrain_gpt.py'; D='--a \"b c\" --d'; eval $C $D; eval \"$C $D\"",
    "eval with variable": "N=5; C='probe pretrain_gpt.py $N \"$N x\"'; N=6; eval $C",
    "command in variable": 'C="probe pretrain_gpt.py --a 1"; $C --b "c d"; O="--x"; $C $O',
    "command in array": 'C=(probe pretrain_gpt.py --name "a b"); "${C[@]}" --more',
    "printed": 'A=$(echo x y); B=$(basename /a/b.sh .sh); C=$(dirname /a/b/c); probe pretrain_gpt.py $A "$A" $B $C `basename /q/r`',
    "heredoc text": "A=1\nread -r -d '' T <<EOF\n--a $A\n--b \\$A\nEOF\nprobe pretrain_gpt.py $T",
    "cat heredoc": "A=1\nT=$(cat <<EOF\n--a $A --b\nEOF\n)\nprobe pretrain_gpt.py $T",
    "herestring": 'A="1 2"; read X <<< "$A"; probe pretrain_gpt.py $X',
    "unset": "A=1; unset A; probe pretrain_gpt.py ${A:-gone}",
    "subshell": "A=1; (A=2; probe pretrain_gpt.py $A); probe pretrain_gpt.py $A",
    "group": "{ A=3; B=4; }; probe pretrain_gpt.py $A $B",
    "set positional": 'set -- a "b c"; probe pretrain_gpt.py "$@" $# "$2" ${1}',
    "positional": 'probe pretrain_gpt.py ${1:-one} "${2:-two words}" $# "$@" end',
    "export": 'export A=1 B="2 3"; declare C=4; readonly D=5; probe pretrain_gpt.py $A "$B" $C $D',
    "multi line text": 'A="\n  --a 1 \\\n  --b 2\n"\nprobe pretrain_gpt.py $A',
    "tabs and blanks": "A='\t--a\t1  --b '; probe pretrain_gpt.py $A",
    "quote in middle": 'A=x; probe pretrain_gpt.py --p=\'a b\'"$A"c --q="$A"/d e"f"g',
    "dollar text": "probe pretrain_gpt.py $'a\\tb' \"\\$x\" '\\n' \"a\\\\b\"",
    "glob stays": "probe pretrain_gpt.py [0]*3+[1]*58 '*' a?b",
    "command substitution in text": 'A="$(echo 1)-$(echo 2)"; probe pretrain_gpt.py "$A"',
    "exit code": "false; if [ $? -ne 0 ]; then :; fi; probe pretrain_gpt.py x",
    "allexport": "set -a; A=1; set +a; probe pretrain_gpt.py $A",
    "comma": "A=1,2,3; IFSX=; probe pretrain_gpt.py ${A//,/ } ${A%%,*} ${A##*,}",
    "nested braces": 'A=x; B="${A:+${A}_y}"; probe pretrain_gpt.py "$B" "${B:-${A}}z"',
    "path of variables": "A=a; B=b; C=c; D=$A/x/$B/$C; E=$A/$B/$C.txt; probe pretrain_gpt.py $D $E --f=$A/y/$B/$C/z",
    "string of strings": 'A="it\'s"; B=\'say "hi"\'; probe pretrain_gpt.py "$A" "$B" $A',
}


@pytest.mark.parametrize("snippet", SNIPPETS.values(), ids=SNIPPETS)
def test_words_are_those_of_bash(snippet: str) -> None:
    wanted = bash_words(snippet)
    assert wanted
    assert read_words(snippet) == wanted


NAMES = ["A", "B", "C"]
LITERAL = st.text(st.sampled_from("ab1 -_./=\\ 'é\t"), max_size=8)
QUOTED = LITERAL.map(lambda text: "'" + text.replace("'", "'\\''") + "'")
DOUBLE = st.lists(
    st.one_of(
        st.text(st.sampled_from("ab1 -./=\t"), max_size=6),
        st.sampled_from(NAMES).map(lambda name: f"${{{name}}}"),
        st.sampled_from(
            ["\\$A", '\\"', "\\\\", "${B}", "${A:-x y}", "${C:+z}", "${B%a*}", "${A#?}", "${#A}", "$((1+2))"]
        ),
    ),
    max_size=4,
).map(lambda parts: '"' + "".join(parts) + '"')
BARE = st.sampled_from(
    [
        "$A",
        "$B",
        "${C}",
        "x$A",
        "${A}y",
        "${B:-d e}",
        "${N:-d}",
        "--f=$C",
        "${L[@]}",
        "${A//a/ }",
        "${B/1/q}",
        "a\\ b",
    ]
)
WORD = st.one_of(QUOTED, DOUBLE, BARE, st.sampled_from(['"${L[@]}"', '"${L[*]}"', '"${L[1]:-n}"']))
VALUE = st.one_of(QUOTED, DOUBLE)
PROGRAM = st.tuples(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["=", "+="]), VALUE), max_size=4),
    st.lists(WORD, max_size=4),
    st.lists(WORD, min_size=1, max_size=5),
)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAM)
def test_generated_words_are_those_of_bash(
    program: tuple[list[tuple[str, str, str]], list[str], list[str]],
) -> None:
    assignments, items, words = program
    lines = ["A=a1; B='b a'; C=", *(f"{name}{sign}{value}" for name, sign, value in assignments)]
    snippet = "\n".join([*lines, f"L=({' '.join(items)})", f"probe pretrain_gpt.py {' '.join(words)}"])
    wanted = bash_words(snippet)
    assert read_words(snippet) == wanted, snippet
