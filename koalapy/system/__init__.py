"""Use the operating system: clocks, TLS, private files, limits, systemd, sockets, hardening, the local token.

Imports ``koalapy.model`` only, and of modules that the command line reads at start the standard library besides; the
runner (``koalapy.runner``) has copies of what it needs, as it may import nothing. Start reading in ``files``
and ``tls``.
"""
