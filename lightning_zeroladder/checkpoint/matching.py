"""Find a model's parameters in a checkpoint by name, and say what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_zeroladder.checkpoint.errors import CheckpointMismatch
from lightning_zeroladder.checkpoint.state import SavedParameter, SavedState

__all__ = ["Match", "match_parameters"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Match:
    """Which parameter of a checkpoint is which of a model.

    Attributes:
        saved: By the model's name.
        missing: Names of the model's that the checkpoint does not have.
        extras: Entries of the module's state dict that are no parameters, by the model's name.
        added: What the model's names begin with and those of the checkpoint do not.
        removed: What the checkpoint's names begin with and those of the model do not.
    """

    saved: Mapping[str, SavedParameter]
    missing: tuple[str, ...]
    extras: Mapping[str, Any]
    added: str = ""
    removed: str = ""

    def prefix(self, name: str) -> str:
        """Return the model's name for a name in the checkpoint."""
        return self.added + name.removeprefix(self.removed)


def match_parameters(
    state: SavedState,
    params: Mapping[str, tuple[int, ...]],
    *,
    may_lack: Collection[str] = (),
    may_add: Collection[str] | None = (),
) -> Match:
    """Find every parameter.

    A checkpoint of a bare module fits a LightningModule that holds it in an attribute, and the other way round: one
    common beginning of all names may differ.

    Args:
        state: The checkpoint.
        params: Shapes by name in the model.
        may_lack: Names that the checkpoint need not have.
        may_add: Other entries of the model's state dict; None to accept any name in the checkpoint.

    Raises:
        CheckpointMismatch: If names or shapes differ, with the first of them.
    """
    added, removed = _prefixes(_names(state), params)
    renamed = {added + name.removeprefix(removed): item for name, item in state.parameters.items()}
    for name, of in state.aliases.items():
        if of in state.parameters:
            renamed.setdefault(added + name.removeprefix(removed), state.parameters[of])
    saved = {name: renamed[name] for name in params if name in renamed}
    missing = [name for name in params if name not in saved]
    lacking = [name for name in missing if name not in may_lack]
    unknown = [
        added + name.removeprefix(removed)
        for name in state.parameters
        if added + name.removeprefix(removed) not in params
    ]
    unexpected = [name for name in unknown if may_add is not None and name not in may_add]
    # A parameter that is tied in one of the two is there under its other name.
    tied = {added + name.removeprefix(removed) for pair in state.aliases.items() for name in pair}
    unexpected = [name for name in unexpected if name not in tied]
    if lacking or unexpected:
        raise CheckpointMismatch(_differences(state, lacking, unexpected, len(saved)))
    wrong = [(name, params[name], item.shape) for name, item in saved.items() if item.shape != params[name]]
    if wrong:
        shown = "; ".join(
            f"'{name}' is {list(model)} in the model and {list(kept)} there" for name, model, kept in wrong[:_SHOWN]
        )
        raise CheckpointMismatch(
            f"{state.folder} belongs to a model of other sizes: {shown}{_more(len(wrong))}. Build the model with the "
            "sizes that it was saved with."
        )
    return Match(
        saved=saved,
        missing=tuple(missing),
        extras={name: value for name, value in _extras(state, added, removed).items() if name not in params},
        added=added,
        removed=removed,
    )


def _names(state: SavedState) -> list[str]:
    return [*state.parameters, *state.aliases]


def _prefixes(saved: Iterable[str], params: Iterable[str]) -> tuple[str, str]:
    """Return what to add to, and what to take from, the beginning of the saved names, where one change fits all."""
    mine, theirs = set(params), set(saved)
    if mine & theirs or not mine or not theirs:
        return "", ""
    first = min(theirs, key=len)
    for name in mine:
        if name.endswith("." + first):
            prefix = name[: -len(first)]
            if all(prefix + item in mine for item in theirs):
                return prefix, ""
    first = min(mine, key=len)
    for name in theirs:
        if name.endswith("." + first):
            prefix = name[: -len(first)]
            if all(prefix + item in theirs for item in mine):
                return "", prefix
    return "", ""


def _extras(state: SavedState, added: str, removed: str) -> dict[str, Any]:
    return {added + name.removeprefix(removed): value for name, value in state.extras.items()}


def _differences(state: SavedState, lacking: list[str], unexpected: list[str], common: int) -> str:
    parts = []
    if lacking:
        parts.append(f"it has no {_list(lacking)}")
    if unexpected:
        parts.append(f"it has {_list(unexpected)}, which the model has not")
    return (
        f"{state.folder} belongs to another model ({common} parameters in common): {'; '.join(parts)}. Build the model "
        "as it was when the checkpoint was saved, or set strict_loading = False on the LightningModule to load what "
        "fits."
    )


def _list(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + _more(len(names))


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""
