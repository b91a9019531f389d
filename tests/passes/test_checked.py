"""An index that is out of range is an error of the call, whichever thread meets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from psg_fx.torch_private.checked import thrown_behind

LOOPS = """
{
    #pragma omp parallel num_threads(2)
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for collapse(2)
            for(int64_t x0=0; x0<4; x0+=1)
            {
                for(int64_t x1=0; x1<4; x1+=1)
                {
                    for(int64_t x2=0; x2<4; x2+=1)
                    {
                        TORCH_CHECK(x2 < 3, "index");
                    }
                }
            }
        }
        #pragma omp single
        {
            out[0] = in[0];
        }
    }
    out[1] = in[1];
}
"""

PROGRAM = """
import psg_fx, torch
from torch import nn

model = nn.Sequential(nn.Embedding(50, 64), nn.Flatten(), nn.Linear(64 * 8, 9))
x, y = torch.randint(50, (512, 8)), torch.randint(9, (512,))
step = psg_fx.transform(model, nn.functional.cross_entropy, quantities=psg_fx.Norms(), progress=False)
right = step(x, y).norms
wrong_x, wrong_y = x.clone(), y.clone()
wrong_x[256, 1], wrong_y[256] = 50, 9
for batch in ((wrong_x, y), (x, wrong_y)):
    try:
        step(*batch)
    except psg_fx.BadArgument as error:
        print(error.__cause__, "|", *str(error).splitlines())
assert torch.equal(step(x, y).norms, right)
"""


@pytest.mark.inductor
def test_two_threads_say_what_one_says() -> None:
    """What is thrown inside of a parallel region ends the process."""
    said = {}
    for threads in ("1", "2"):
        command, env = [sys.executable, "-c", PROGRAM], os.environ | {"OMP_NUM_THREADS": threads}
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        said[threads] = [re.sub(r"^kernel, .*?, |tmp\d+", "", line) for line in done.stdout.splitlines()]
    of_input, of_target = said["2"]
    assert of_input.startswith("index out of bounds: 0 <=  < 50L")
    assert "IndexError: index out of range in self" in of_input
    assert of_target.startswith("index out of bounds: 0 <=  < 9L")
    assert "IndexError: Target 9 is out of bounds" in of_target
    assert said["1"] == said["2"]


def test_shares_of_threads_keep_what_they_throw() -> None:
    lines = [line.strip() for line in thrown_behind(LOOPS).splitlines()]
    tries = [place for place, line in enumerate(lines) if line.endswith("try")]
    assert [lines[place - 1] for place in tries] == ["for(int64_t x1=0; x1<4; x1+=1)", "#pragma omp single"]
    caught = [place for place, line in enumerate(lines) if line.startswith("catch")]
    assert lines[caught[0] - 3 : caught[0]] == ['TORCH_CHECK(x2 < 3, "index");', "}", "}"]
    assert lines[caught[1] - 2 : caught[1]] == ["out[0] = in[0];", "}"]
    thrown = next(place for place, line in enumerate(lines) if "rethrow_exception" in line)
    assert lines[thrown + 2] == "out[1] = in[1];"


@pytest.mark.parametrize("without", [r"TORCH_CHECK\(.*;", r"#pragma omp parallel.*"])
def test_other_loops_are_left_as_they_are(without: str) -> None:
    code = re.sub(without, "", LOOPS)
    assert thrown_behind(code) == code
