"""What connections by TLS are at least, and the other side known by one certificate alone. Standard library only, and
little of it."""

import ssl

_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL."""


def secure(context: ssl.SSLContext) -> ssl.SSLContext:
    """The context, which speaks nothing older than TLS 1.2; without OpenSSL's configuration it might."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def pinned(certificate: str) -> ssl.SSLContext:
    """Trusts one certificate (PEM), which the other side must show itself, and no other."""
    context = secure(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False  # It may be known by any name: it is this one.
    context.load_verify_locations(cadata=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    return context
