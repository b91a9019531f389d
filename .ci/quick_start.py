"""Runs the first Python of the README with the psg_fx that is installed."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
assert code is not None
names: dict[str, object] = {}
exec(compile(code[1], str(README), "exec"), names)
print(names["psg_fx"], names["out"])
