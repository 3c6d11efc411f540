"""See every collective that DeepSpeed calls, for as long as one looks.

DeepSpeed sends its communication through one backend object. While a trial is measured, a proxy stands in its place;
afterwards the original is back and nothing is left in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning_zeroladder.engine.groups import replace_backend

__all__ = ["BackendObserver"]

_COLLECTIVES = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_base",
        "all_gather_coalesced",
        "all_to_all_single",
        "all_to_all",
        "barrier",
        "all_gather_function",
        "reduce_scatter_function",
    }
)

Span = Callable[[], AbstractContextManager[None]]

Note = Callable[[str, tuple[Any, ...], Mapping[str, Any]], None]
"""Called with the name and the arguments of each collective before it begins."""


class _TimedWork:
    """A work handle whose wait is seen."""

    def __init__(self, work: Any, span: Span) -> None:
        self._work, self._span = work, span

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._span():
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Proxy:
    """Looks like the backend and opens a span around each collective and each wait for one."""

    def __init__(self, backend: Any, span: Span, note: Note | None) -> None:
        self.__dict__.update(_backend=backend, _span=span, _note=note, _wrapped={})

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value)

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._backend, name)
        if name not in _COLLECTIVES or not callable(target):
            return target
        wrapped = self._wrapped.get(name)
        if wrapped is None:
            wrapped = self._wrapped[name] = self._wrap(name, target)
        return wrapped

    def _wrap(self, name: str, target: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._note is not None:
                self._note(name, args, kwargs)
            with self._span():
                result = target(*args, **kwargs)
            return _TimedWork(result, self._span) if hasattr(result, "wait") else result

        return call


class BackendObserver:
    """Puts the proxy in and takes it out.

    Args:
        span: Makes a context manager that is entered for as long as the calling thread is inside a collective or
            waits for one.
        note: Told of each collective, to count it.
    """

    def __init__(self, span: Span, note: Note | None = None) -> None:
        self._span = span
        self._note = note
        self._original: Any = None

    def start(self) -> None:
        """Begin observing. Does nothing if already begun or if DeepSpeed has no backend."""
        if self._original is None:
            original = replace_backend(None)
            self._original = original
            replace_backend(_Proxy(original, self._span, self._note) if original is not None else None)

    def stop(self) -> None:
        """Put the backend back. Idempotent."""
        if self._original is not None:
            replace_backend(self._original)
            self._original = None
