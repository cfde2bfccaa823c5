"""What errors carry to the caller."""

from koalapy.model.errors import BusyError, KoalaError, SiteError, SiteRejected, SiteUnavailable, UsageError


def test_an_error_says_where_and_the_way_out() -> None:
    error = UsageError("walltime is 0", field="walltime", value=0, hint="give more")
    assert (str(error), error.message, error.field, error.value, error.hint) == (
        "walltime is 0",
        "walltime is 0",
        "walltime",
        0,
        "give more",
    )


def test_a_busy_daemon_says_when_to_come_back() -> None:
    error = BusyError("100 jobs wait already", retry_after=2.5, hint="submit again later")
    assert (error.message, error.retry_after, error.hint) == ("100 jobs wait already", 2.5, "submit again later")


def test_everything_raised_on_purpose_is_one_family() -> None:
    assert issubclass(SiteError, KoalaError)
    assert issubclass(SiteUnavailable, SiteError)
    assert issubclass(SiteRejected, SiteError)
