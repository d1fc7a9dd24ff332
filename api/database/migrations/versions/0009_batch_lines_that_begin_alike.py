"""Lines of a batch that begin alike, and when it is their turn"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: str | None = None
depends_on: str | None = None

TABLE = "batch_lines"


def upgrade() -> None:
    with op.batch_alter_table(TABLE) as altered:
        altered.add_column(sa.Column("head", sa.String(16)))
        altered.add_column(sa.Column("turn", sa.Integer(), nullable=False, server_default="0"))
    op.execute(sa.text(f"UPDATE {TABLE} SET turn = number"))
    op.create_index("ix_batch_lines_batch_id_state_turn", TABLE, ["batch_id", "state", "turn", "number"])
    op.create_index("ix_batch_lines_batch_id_head", TABLE, ["batch_id", "head"])


def downgrade() -> None:
    op.drop_index("ix_batch_lines_batch_id_head", TABLE)
    op.drop_index("ix_batch_lines_batch_id_state_turn", TABLE)
    with op.batch_alter_table(TABLE) as altered:
        altered.drop_column("turn")
        altered.drop_column("head")
