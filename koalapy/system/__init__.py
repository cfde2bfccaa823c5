"""Use the operating system: clocks, TLS, private files, process limits, systemd, sockets, the daemon's own token.

Imports ``koalapy.model`` only, and in modules that the command line reads at start the standard library besides. The
runner (``koalapy.runner``) has its own copies of what it needs, since it imports no other
package of the project. Start reading in ``files`` and ``tls``.
"""
