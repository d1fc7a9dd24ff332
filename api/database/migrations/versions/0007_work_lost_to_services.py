"""What training lost that gave way to the replicas of a service"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | None = None
depends_on: str | None = None

AMOUNTS = ("caused_seconds", "caused_cost")


def upgrade() -> None:
    for table in ("jobs", "compute"):
        with op.batch_alter_table(table) as altered:
            for name in AMOUNTS:
                altered.add_column(sa.Column(name, sa.Float(), nullable=False, server_default="0"))


def downgrade() -> None:
    for table in ("compute", "jobs"):
        with op.batch_alter_table(table) as altered:
            for name in reversed(AMOUNTS):
                altered.drop_column(name)
