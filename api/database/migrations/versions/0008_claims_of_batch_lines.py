"""Indexes with which a claim of batch lines does not depend on how many lines there are"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | None = None
depends_on: str | None = None

TABLE = "batch_lines"
LENT = sa.text("holder IS NOT NULL")


def upgrade() -> None:
    op.drop_index("ix_batch_lines_batch_id_state", TABLE)
    op.create_index("ix_batch_lines_batch_id_state_number", TABLE, ["batch_id", "state", "number"])
    op.create_index("ix_batch_lines_lent", TABLE, ["batch_id"], sqlite_where=LENT, postgresql_where=LENT)


def downgrade() -> None:
    op.drop_index("ix_batch_lines_lent", TABLE)
    op.drop_index("ix_batch_lines_batch_id_state_number", TABLE)
    op.create_index("ix_batch_lines_batch_id_state", TABLE, ["batch_id", "state"])
