"""The program with autoparallel says what it needs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from shardweave.bench.baselines import autoparallel_model


@pytest.mark.skipif(find_spec("autoparallel") is not None, reason="autoparallel is installed")
def test_without_autoparallel(capsys: pytest.CaptureFixture[str]) -> None:
    assert autoparallel_model.main([]) == 2
    assert "autoparallel is not installed; allowed: pip install" in capsys.readouterr().err
