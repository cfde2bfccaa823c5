"""Run one call of an executor on a node. It is sent to the node as a file: standard library only, Python 3.9 or newer.

The folder has the calls of the array, of which this task makes one, and may have the script that defines the function.
"""

import os
import pickle
import runpy
import sys
import traceback
import types

MAIN = "__mp_main__"
"""The name of the script's module, as of multiprocessing: code to run belongs below ``if __name__ == "__main__"``."""
CALLS, SCRIPT, RESULT = "koala_calls.pickle", "koala_main.py", "koala_result.pickle"


def make_call() -> tuple[bool, object, str]:
    """Return whether the call of this task has raised, its value or exception, and the traceback."""
    try:
        if os.path.exists(SCRIPT):
            main = types.ModuleType(MAIN)
            vars(main).update(runpy.run_path(SCRIPT, run_name=MAIN))
            sys.modules["__main__"] = sys.modules[MAIN] = main
        with open(CALLS, "rb") as file:
            call = pickle.load(file)[int(os.environ["KOALA_ARRAY_INDEX"]) - 1]
        function, arguments, keywords = pickle.loads(call)
        return False, function(*arguments, **keywords), ""
    except BaseException as error:  # noqa: BLE001 # the future raises it
        return True, error, traceback.format_exc()


def dump_result(has_raised: bool, value: object, trace: str) -> bytes:
    """Return the result of a call as bytes; an error in its place if it cannot be sent."""
    try:
        # Imported if the call was sent by it.
        dumps = getattr(sys.modules.get("cloudpickle"), "dumps", pickle.dumps)
        result = dumps((has_raised, value, trace))
        pickle.loads(result)  # an exception with other parameters than its arguments fails here
        return result
    except Exception as error:  # noqa: BLE001 # pickling runs any code
        problem = trace or f"{type(value).__name__} cannot be sent: {error}"
        return pickle.dumps((True, RuntimeError(f"{type(value).__name__}: {value}"[:1000]), problem))


if __name__ == "__main__":
    has_raised, value, trace = make_call()
    with open(f"{RESULT}.part", "wb") as file:
        file.write(dump_result(has_raised, value, trace))
    os.replace(f"{RESULT}.part", RESULT)
    sys.stderr.write(trace)
    sys.exit(has_raised)
