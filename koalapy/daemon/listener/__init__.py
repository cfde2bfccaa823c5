"""Accept connections: TLS with a certificate that is read again when it changes, bounds, and a stand-in.

Start at ``connections.py``, which bounds connections and closes an idle one when there are too many; agents always
find a place. ``stand_in.py`` answers 503 while the loop hangs.
"""
