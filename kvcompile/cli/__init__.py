"""The command line. `main` imports what a command needs when it is called, so that nothing here costs an import."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run `kvcompile`."""
    try:
        import rich  # noqa: F401, PLC0415
        import typer  # noqa: F401, PLC0415
    except ImportError as error:
        sys.exit(f"kvcompile's command line needs {error.name}: install the extra, pip install 'kvcompile[cli]'")
    from kvcompile.cli.app import app  # noqa: PLC0415

    app()
