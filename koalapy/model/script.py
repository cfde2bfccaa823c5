"""Check the script of a job, which runs once on its head node."""

MAX_SCRIPT_BYTES = 1024 * 1024
INTERPRETER = "#!/bin/bash"


def find_script_error(text: str) -> tuple[str, str] | None:
    """Return what is wrong with a script, and what to do; None if nothing is."""
    first_line = text.partition("\n")[0]
    if (size := len(text.encode(errors="replace"))) > MAX_SCRIPT_BYTES:
        return f"has {size} bytes, more than {MAX_SCRIPT_BYTES}", "put data into files, and send them by --stage"
    if "\0" in text:
        return "is a program, not a script", "put -- before the command"
    if "\r\n" in text or first_line.endswith("\r"):
        return "has Windows line ends, which its interpreter cannot read", "convert it, for example by dos2unix"
    if not first_line.startswith("#!") or not first_line[2:].strip():
        return "does not begin with #! and an interpreter", f"begin it with the line {INTERPRETER}"
    if not first_line[2:].strip().startswith("/"):
        interpreter = first_line[2:].split()[0]
        return f"names the interpreter {interpreter} without its path", f"write its path, as in {INTERPRETER}"
    return None
