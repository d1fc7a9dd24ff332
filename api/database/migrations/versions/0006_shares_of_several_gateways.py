"""Leases of limits, by which several gateways share them"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "budget_leases",
        sa.Column("account", sa.String(length=700), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("gateway", sa.String(length=128), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.Column("needed", sa.BigInteger(), nullable=False),
        sa.Column("wanted", sa.BigInteger(), nullable=False),
        sa.Column("fallback", sa.BigInteger(), nullable=False),
        sa.Column("target", sa.BigInteger(), nullable=True),
        sa.Column("told_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("fallback_until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("account", "kind", "gateway", name=op.f("pk_budget_leases")),
    )
    op.create_index("ix_budget_leases_gateway", "budget_leases", ["gateway"])
    op.create_table(
        "lease_rounds",
        sa.Column("gateway", sa.String(length=128), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("gateway", name=op.f("pk_lease_rounds")),
    )


def downgrade() -> None:
    op.drop_table("lease_rounds")
    op.drop_table("budget_leases")
