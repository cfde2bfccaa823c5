"""Store when a reservation got its state, in place of when it was made."""

from alembic import op

revision = "0005_reservation_changes"
down_revision = "0004_reservations"


def upgrade() -> None:
    op.alter_column("reservations", "made_at", new_column_name="changed_at")


def downgrade() -> None:
    op.alter_column("reservations", "changed_at", new_column_name="made_at")
