"""Fields of errors."""

from koalapy.model.errors import BusyError, KoalaError, SiteError, SiteRejected, SiteUnavailable, UsageError


def test_usage_error_has_field_value_and_hint() -> None:
    error = UsageError("walltime is 0", field="walltime", value=0, hint="give more")
    assert (str(error), error.message, error.field, error.value, error.hint) == (
        "walltime is 0",
        "walltime is 0",
        "walltime",
        0,
        "give more",
    )


def test_busy_error_has_retry_after() -> None:
    error = BusyError("100 jobs wait already", retry_after=2.5, hint="submit again later")
    assert (error.message, error.retry_after, error.hint) == ("100 jobs wait already", 2.5, "submit again later")


def test_site_errors_are_koala_errors() -> None:
    assert issubclass(SiteError, KoalaError)
    assert issubclass(SiteUnavailable, SiteError)
    assert issubclass(SiteRejected, SiteError)
