"""The compiler's passes, installed as `psg_fx.passes` (the folder lies at the top of the checkout)."""

if __name__ == "passes":
    raise ImportError(
        "this folder is the package psg_fx.passes: use `import psg_fx.passes`, after `pip install -e .` in the checkout"
    )
