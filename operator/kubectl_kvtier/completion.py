"""Completion: for kubectl (`kubectl_complete-kvtier`, which it runs) and for the command by itself.

kubectl reads one candidate a line and a directive as the last line (`:4`: no file names). Completion never
fails aloud: without a cluster there are no names. It must not know what commands do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence

NO_FILES, FILES = 4, 0
NAME_SECONDS = 5.0

SHELLS = {
    "bash": """_kubectl_kvtier() {{
  local out
  out=$({program} __complete "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null)
  mapfile -t COMPREPLY < <(compgen -W "$(printf '%s' "$out" | sed '$d')" -- "${{COMP_WORDS[COMP_CWORD]}}")
  if [[ "$(printf '%s' "$out" | tail -n 1)" == ":0" ]]; then
    COMPREPLY+=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}"))
  fi
  return 0
}}
complete -F _kubectl_kvtier {program}
""",
    "zsh": """#compdef {program}
_kubectl_kvtier() {{
  local out
  out=("${{(@f)$({program} __complete "${{words[@]:1:$((CURRENT-1))}}" 2>/dev/null)}}")
  compadd -- "${{out[@]:0:-1}}"
  [[ "${{out[-1]}}" == ":0" ]] && _files
}}
compdef _kubectl_kvtier {program}
""",
    "fish": """function __kubectl_kvtier
  set -l out ({program} __complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)
  printf '%s\\n' $out[1..-2]
end
complete -c {program} -f -a '(__kubectl_kvtier)'
""",
}


def script(shell: str, program: str = "kubectl-kvtier") -> str:
    return SHELLS[shell].format(program=program)


def complete(
    parser: argparse.ArgumentParser, words: Sequence[str], names: Callable[[str], Sequence[str]]
) -> list[str]:
    """Candidates for the last of `words`, which may be empty, then the directive. names: of the objects of a
    plural, in the namespace of the words."""
    *before, last = words or [""]
    commands = _commands(parser)
    command = next((word for word in before if word in commands), None)
    if command is None:
        return [*_matching([*commands, *_options(parser)], last), f":{NO_FILES}"]
    sub = commands[command]
    taken = before[-1] if before else ""
    waiting = next((one for one in sub._actions if taken in one.option_strings and one.nargs != 0), None)
    if waiting is not None:
        found = list(waiting.choices or [])
        return [*_matching(found, last), f":{NO_FILES if found else FILES}"]
    if last.startswith("-"):
        return [*_matching(_options(sub), last), f":{NO_FILES}"]
    positional = next((one for one in sub._actions if not one.option_strings), None)
    if positional is None:
        return [f":{NO_FILES}"]
    if positional.choices:
        return [*_matching(list(positional.choices), last), f":{NO_FILES}"]
    plural = getattr(sub, "completes", "")
    return [*_matching(names(plural), last), f":{NO_FILES}"] if plural else [f":{FILES}"]


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {name: sub for name, sub in action.choices.items() if not name.startswith("__")}
    return {}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(
        text for action in parser._actions for text in action.option_strings if text.startswith("--")
    )


def _matching(candidates: Sequence[str], start: str) -> list[str]:
    return sorted(one for one in candidates if one.startswith(start))


def main() -> int:
    """The program `kubectl_complete-kvtier`."""
    from kubectl_kvtier.cli import make_parser, names_in_cluster

    words = sys.argv[1:]

    def names(plural: str) -> Sequence[str]:
        try:
            return asyncio.run(names_in_cluster(plural, words))
        except Exception:
            return []

    print("\n".join(complete(make_parser(), words, names)))
    return 0
