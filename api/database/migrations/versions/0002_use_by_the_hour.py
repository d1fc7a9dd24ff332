"""Use of compute by the hour, and samples that can be written twice

Samples that are there already keep their place under marks that no new one takes. Jobs bring in their totals in
the hour in which they were last known to run.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None

AMOUNTS = ("accelerator_seconds", "work_units", "energy_joules", "cost", "lost_seconds")


def upgrade() -> None:
    op.create_table(
        "compute",
        sa.Column("uid", sa.String(length=64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        *(sa.Column(name, sa.Float(), nullable=False) for name in AMOUNTS),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name=op.f("fk_compute_uid_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", "at", name=op.f("pk_compute")),
    )
    amounts = ", ".join(AMOUNTS)
    op.execute(
        f"INSERT INTO compute (uid, at, {amounts}) "
        f"SELECT uid, COALESCE(completed_at, deleted_at, seen_at), {amounts} FROM jobs"
    )
    with op.batch_alter_table("samples", schema=None) as batch_op:
        batch_op.add_column(sa.Column("mark", sa.BigInteger(), nullable=True))
    op.execute("UPDATE samples SET mark = -id")
    with op.batch_alter_table("samples", schema=None) as batch_op:
        batch_op.alter_column("mark", existing_type=sa.BigInteger(), nullable=False)
        batch_op.create_unique_constraint(op.f("uq_samples_uid_attempt_mark"), ["uid", "attempt", "mark"])


def downgrade() -> None:
    with op.batch_alter_table("samples", schema=None) as batch_op:
        batch_op.drop_constraint(op.f("uq_samples_uid_attempt_mark"), type_="unique")
        batch_op.drop_column("mark")
    op.drop_table("compute")
