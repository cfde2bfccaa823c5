"""Start the ``koala`` command: the console script, and ``python -m koalapy.cli``.

Imports nothing outside of ``main``, so that an interrupt ends the command without a traceback.
"""


def main() -> None:
    """Run the command of this process and exit."""
    try:
        from koalapy.cli import startup

        startup.begin_imports()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    from koalapy.cli.main import main as run_main

    try:
        run_main()
    finally:
        startup.begin_exit()


if __name__ == "__main__":
    main()
