"""What torch says of itself while a model is captured is not heard; what the model says is."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from psg_fx import BadArgument
from psg_fx.torch_private.quiet import quiet
from support.small import WithLayer, step

X, Y = torch.zeros(3, 4), torch.tensor([0, 1, 2])


class Talks(WithLayer):
    """Logs, warns and prints."""

    def forward(self, x: Tensor) -> Tensor:
        print("printed")
        print("complained", file=sys.stderr)
        logging.getLogger("mine").warning("logged")
        return self.layer(x)


@pytest.mark.parametrize("width", [4, 6])
def test_torch_is_quiet_and_the_model_is_not(width: int, capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    """Also where the capture fails."""
    made = step(Talks(), progress=False)
    if width == 4:
        made(X, Y)
    else:
        with pytest.raises(BadArgument):
            made(torch.zeros(3, width), Y)
    printed = capfd.readouterr()
    assert set(printed.out.split()) == {"printed"}
    assert set(printed.err.split()) - {"logged"} == {"complained"}
    assert {record.name.partition(".")[0] for record in caplog.records} <= {"mine", "psg_fx"}
    assert "logged" in caplog.messages


def test_torch_is_quiet_in_the_capturing_thread_only(capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    torch_log, stream = logging.getLogger("torch._subclasses.fake_tensor"), sys.stderr
    with quiet():
        torch_log.error("hidden")
        other = threading.Thread(target=lambda: torch_log.error("of another thread"))
        other.start()
        other.join()
        print("of mine", file=sys.stderr)
    torch_log.error("afterwards")
    assert sys.stderr is stream
    assert caplog.messages == ["of another thread", "afterwards"]
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if not line.endswith(("of another thread", "afterwards"))] == ["of mine"]
