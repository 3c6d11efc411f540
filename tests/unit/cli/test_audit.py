from __future__ import annotations

import pytest

from lightning_zeroladder.cli import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stage", "2", "--accumulate", "0"], "accumulate=0: must be at least 1"),
        (["--stage", "2", "--ranks", "1"], "ranks=1: traffic is between ranks"),
        (["--stage", "0", "--owners"], "--owners changes stages 1 and 2, not stage 0"),
        (["--stage", "2", "--refetch"], "change stage 3, not stage 2"),
        (["--stage", "3", "--persistence-threshold", "-1"], "persistence_threshold=-1: must be 0 or more"),
    ],
)
def test_mistakes_are_found_before_ranks_start(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 1
    assert says in capsys.readouterr().err
