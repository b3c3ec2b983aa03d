"""`python -m spec_kernels`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say which packages it needs."""
    try:
        from spec_kernels.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("spec_kernels"):
            raise
        hint = "python -m pip install 'spec-kernels[demo]'"
        sys.stderr.write(f"error: the command line needs {error.name}; run: {hint}\n")
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
