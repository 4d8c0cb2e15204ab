"""Shell completion: a script for bash or zsh, which asks this program for candidates at each Tab."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.cli.commands import COMMANDS, PROGRAM
from pipelines.cli.words import groups_with_keys
from pipelines.domain.errors import UserError

BASH = """\
_trtllm_pipelines() {
    local line="${COMP_LINE:0:COMP_POINT}" word start
    word="${line##*[[:space:]]}"
    mapfile -t COMPREPLY < <("$1" --candidates "$line" 2> /dev/null)
    # bash completes what follows the last of its word breaks, = and : among them
    start="${word%"${word##*[=:]}"}"
    [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"$start"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./,] ]] && compopt -o nospace
}
complete -o default -F _trtllm_pipelines trtllm-pipelines
"""

ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }
_trtllm_pipelines() {
    local -a found open
    found=("${(@f)$("${words[1]}" --candidates "${(j: :)words[1,CURRENT]}" 2> /dev/null)}")
    open=("${(@M)found:#*[=./,]}")
    found=("${(@)found:#*[=./,]}")
    compadd -Q -- $found
    compadd -Q -S '' -- $open
}
compdef _trtllm_pipelines trtllm-pipelines
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH}
LISTS = ("sweep", "compare")


def script(words: Sequence[str]) -> str:
    """Return the script that a shell evaluates: eval "$(trtllm-pipelines --completion bash)".

    Raises:
        UserError: the shell is not supported.
    """
    shell = words[0] if words else ""
    if shell not in SCRIPTS:
        raise UserError(
            f"--completion '{shell}' is not a shell that can be completed.",
            allowed=f"Choose one of {', '.join(SCRIPTS)}.",
            todo=f'Add to your shell\'s start file: eval "$({PROGRAM} --completion bash)"',
        )
    return SCRIPTS[shell]


def candidates(words: Sequence[str]) -> str:
    """Return one candidate per line.

    Args:
        words: the line up to the cursor, as one word.
    """
    line = words[0] if words else ""
    typed = [*line.split()[1:], *([""] if line[-1:].isspace() else [])]
    return "".join(f"{each}\n" for each in _candidates(typed or [""]))


def _candidates(typed: Sequence[str]) -> list[str]:
    word = typed[-1]
    if len(typed) == 1:
        return [each for each in (*COMMANDS, "--help", "--version", "--completion") if each.startswith(word)]
    if typed[0] == "--completion":
        return [shell for shell in SCRIPTS if shell.startswith(word)]
    if typed[0] not in COMMANDS:
        return []
    if word.startswith("-"):
        return ["--help"]
    from pipelines.settings.complete import complete

    found = complete(typed[1:])
    if len(typed) == 2 and COMMANDS[typed[0]].argument:
        found += [group for group in groups_with_keys() if group.startswith(word)]
    return [each for each in found if typed[0] in LISTS or not each.startswith("hydra")]
