"""Output that earlier versions kept in the database, on its way to where it is kept now."""

from sqlalchemy import Engine, delete, select

from koalapy.model.job import token_of
from koalapy.ports import OutputPiece, OutputStore
from koalapy.store import tables
from koalapy.store.engine import reading, unavailable_is_known
from koalapy.store.lease import Lease


def move_output(engine: Engine, lease: Lease, target: OutputStore) -> int:
    """Move all that there is, and say of how many components; ``StoreUnavailable``, ``OSError``.

    To be killed in between does no harm: what is there already is not written twice.
    """
    output = tables.output.c
    keys = output.job_id, output.generation, output.component
    with unavailable_is_known(), reading(engine).connect() as connection:
        components = connection.execute(select(*keys).distinct().order_by(*keys)).all()
    for job, generation, component in components:
        this = (output.job_id == job) & (output.generation == generation) & (output.component == component)
        with unavailable_is_known(), reading(engine).connect() as connection:
            query = select(output.offset, output.data).where(this).order_by(output.offset)
            for part in connection.execution_options(yield_per=64).execute(query).partitions():
                pieces = [OutputPiece(row.offset, row.data, missing=row.offset) for row in part]
                target.append(token_of(job, generation, component, nonce=""), pieces)
        with lease.writing() as connection:
            connection.execute(delete(tables.output).where(this))
    return len(components)
