"""The `kvscope` command, and `python -m kvscope.dashboard`: loads the command line; Ctrl-C may come meanwhile."""

import signal


def main() -> None:
    """Entry point. During the imports, an interrupt ends the process as it ends any program: without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as nohup has it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvscope.dashboard import cli

    cli.main()


if __name__ == "__main__":
    main()
