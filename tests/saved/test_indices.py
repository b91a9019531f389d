"""An index that is out of range is an error of a file's call, also where several threads run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.inductor, pytest.mark.slow, pytest.mark.xdist_group("files")]

PROGRAM = """
import sys
import psg_fx, torch
from torch import nn

model = nn.Sequential(nn.Embedding(50, 64), nn.Flatten(), nn.Linear(64 * 8, 9))
x, y = torch.arange(512 * 8).view(512, 8) % 50, torch.arange(512) % 9
step = psg_fx.transform(model, nn.functional.cross_entropy, quantities=psg_fx.Norms(), progress=False)
step.export(sys.argv[1], x, y)
loaded, right = psg_fx.load(sys.argv[1]), step(x, y).norms
wrong_x, wrong_y = x.clone(), y.clone()
wrong_x[256, 1], wrong_y[256] = 50, 9
for batch in ((wrong_x, y), (x, wrong_y)):
    try:
        loaded(model.state_dict(), *batch)
    except psg_fx.BadArgument as error:
        print(error, end="\\n\\n")
torch.testing.assert_close(loaded(model.state_dict(), x, y).norms, right)
"""

SAID = """
an index is out of range
  where  loaded(params, inputs, targets): input_0 from 0 to 50, target_0 from 0 to 8
  why    the compiled code says: index out of bounds: 0 <= index < 50L
  fix    pass indices below the size of what they index; the step itself says which line reads them

an index is out of range
  where  loaded(params, inputs, targets): input_0 from 0 to 49, target_0 from 0 to 9
  why    the compiled code says: index out of bounds: 0 <= index < 9L
  fix    pass indices below the size of what they index; the step itself says which line reads them
"""


def test_an_index_out_of_range(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "step.pt2")]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "2"}, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == SAID.strip()
