"""``python -m koalapy.simulation run NAME…`` is ``koala experiment run NAME…``: as MPI programs are started."""

import sys

from koalapy.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["experiment"]
    main()
