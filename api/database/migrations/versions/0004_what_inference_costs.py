"""What inference costs: limits of tokens, cached tokens and cost of each record, sums by account and hour"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    with op.batch_alter_table("tokens") as tokens:
        tokens.add_column(sa.Column("limits", sa.Text(), nullable=True))
    with op.batch_alter_table("ledger") as ledger:
        ledger.add_column(sa.Column("cached_tokens", sa.BigInteger(), nullable=False, server_default="0"))
        ledger.add_column(sa.Column("cost_nano", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "spending",
        sa.Column("account", sa.String(length=270), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("account", "hour", name=op.f("pk_spending")),
    )


def downgrade() -> None:
    op.drop_table("spending")
    with op.batch_alter_table("ledger") as ledger:
        ledger.drop_column("cost_nano")
        ledger.drop_column("cached_tokens")
    with op.batch_alter_table("tokens") as tokens:
        tokens.drop_column("limits")
