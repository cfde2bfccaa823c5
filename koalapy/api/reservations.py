"""The routes of advance reservations of nodes."""

from typing import Annotated, Any

from fastapi import APIRouter, Path

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.derived import body_model, view_model
from koalapy.api.fields import Output
from koalapy.api.job_views import SubmittedRequest
from koalapy.api.problems import problem_responses
from koalapy.api.routes import api_router
from koalapy.daemon.reservations import ReservationOrder, Reservations
from koalapy.model.reservation import Reservation, ReservedPart

Name = Annotated[fields.Name, Path(description="the reservation's name")]


_NewReservation = body_model("NewReservation", ReservationOrder, "", elements={"request": SubmittedRequest})


class NewReservation(_NewReservation):  # type: ignore[misc, valid-type]
    """The nodes to reserve, and when."""


PartView = view_model("ReservedPart", ReservedPart)
ReservationView = view_model(
    "ReservationView",
    Reservation,
    "Nodes that clusters keep for the jobs of some users.",
    without={"id"},
    elements={"parts": PartView},
)


class ReservationList(Output):
    reservations: list[ReservationView]  # type: ignore[valid-type]


def reservations_router(service: Reservations) -> APIRouter:
    """Return the routes that make, list and cancel reservations."""
    router = api_router("reservations", "/reservations")

    @router.post("", status_code=201, response_model=ReservationView, responses=problem_responses(409))
    async def make_reservation(order: NewReservation, caller: Caller) -> Any:
        """Reserve nodes on all clusters of a request, or on none. A cluster that refuses is left out of a second try
        unless the request names it; the error has the words of each that refused."""
        return await service.make(order.to_model(), caller)

    @router.get("", response_model=ReservationList)
    async def list_reservations(caller: Caller) -> Any:
        """List the reservations that the caller may use, with those that ended in the last 90 days; operators see
        all."""
        return {"reservations": service.list_visible(caller)}

    @router.get("/{name}", response_model=ReservationView, responses=problem_responses(404))
    async def show_reservation(name: Name, caller: Caller) -> Any:
        """Show a reservation."""
        return service.find(name, caller)

    @router.delete("/{name}", response_model=ReservationView, responses=problem_responses(404, 409))
    async def cancel_reservation(name: Name, caller: Caller) -> Any:
        """End a reservation that no job runs in. Jobs that wait for it fail."""
        return await service.cancel(name, caller)

    return router
