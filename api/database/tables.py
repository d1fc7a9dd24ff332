"""The tables. Nothing here is ever needed to schedule: losing this database loses people's tokens and history.

subjects      people who logged in or own tokens
tokens        SHA-256 and prefix of each token; the token itself is shown once and stored nowhere
sessions      browser sessions (SHA-256 of the cookie), revocable
audit         one row per write, who did what to which object, and how it ended
ledger        tokens generated per request; (gateway, seq) makes a repeated delivery harmless
ledger_cursor how far each gateway's deliveries reach
spending      what each key and tenant spent on inference in each hour: sums of the ledger
jobs          one row per TrainingJob or ModelService that ever was: the totals of its status
leases        which replica of the API writes the history
budget_leases which part of each limit each of several gateways may use; left out of backups, as are
lease_rounds  the numbers of the gateways' last requests for them
compute       totals of each job as of each hour in which they grew
files         files that people uploaded for batches, and those of batches' answers; left out of backups, as are
file_parts    their bytes,
batches       the batches of requests made of them, and
batch_lines   one row per request, with its answer; the gateway `holder` runs it until `until`; lines with one `head` begin
                  alike, and have the `turn` of the first of them
samples       loss and throughput over time, thinned as they grow; (uid, attempt, mark) makes a second writer harmless
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from busbar.api.database.types import Utc, big_id, json_type

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

subjects = Table(
    "subjects",
    metadata,
    Column("name", String(253), primary_key=True),
    Column("groups", json_type(), nullable=False),
    Column("source", String(16), nullable=False),
    Column("first_seen", Utc(), nullable=False),
    Column("last_seen", Utc(), nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("subject", String(253), ForeignKey("subjects.name"), nullable=False, index=True),
    Column("description", String(200), nullable=False),
    Column("prefix", String(10), nullable=False),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("scopes", json_type(), nullable=False),
    Column("tenant", String(253)),
    Column("hidden", Boolean, nullable=False),
    Column("limits", Text),
    Column("created_at", Utc(), nullable=False),
    Column("created_by", String(253), nullable=False),
    Column("expires_at", Utc()),
    Column("last_used_at", Utc()),
    Column("revoked_at", Utc()),
)

sessions = Table(
    "sessions",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("subject", String(253), nullable=False),
    Column("groups", json_type(), nullable=False),
    Column("role", String(16), nullable=False),
    Column("scopes", json_type(), nullable=False),
    Column("tenant", String(253)),
    Column("token_id", String(32), ForeignKey("tokens.id")),
    Column("created_at", Utc(), nullable=False),
    Column("expires_at", Utc(), nullable=False, index=True),
)

audit = Table(
    "audit",
    metadata,
    Column("id", big_id(), primary_key=True, autoincrement=True),
    Column("at", Utc(), nullable=False, index=True),
    Column("subject", String(253), nullable=False),
    Column("action", String(64), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("namespace", String(253), nullable=False),
    Column("name", String(253), nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Column("source", String(64), nullable=False),
    Index("ix_audit_subject_id", "subject", "id"),
)

ledger = Table(
    "ledger",
    metadata,
    Column("gateway", String(128), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("key_id", String(32), nullable=False),
    Column("tenant", String(253), nullable=False),
    Column("namespace", String(253), nullable=False),
    Column("service", String(253), nullable=False),
    Column("model", String(253), nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("cost_nano", BigInteger, nullable=False),
    Column("request_id", String(128), nullable=False),
    Column("finished_at", Utc(), nullable=False),
    Column("received_at", Utc(), nullable=False),
    Index("ix_ledger_tenant_finished_at", "tenant", "finished_at"),
)

ledger_cursor = Table(
    "ledger_cursor",
    metadata,
    Column("gateway", String(128), primary_key=True),
    Column("accepted_through", BigInteger, nullable=False),
    Column("updated_at", Utc(), nullable=False),
)

spending = Table(
    "spending",
    metadata,
    Column("account", String(270), primary_key=True),
    Column("hour", Utc(), primary_key=True),
    Column("cost_nano", BigInteger, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("holder", String(64), nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("until", Utc(), nullable=False),
)

budget_leases = Table(
    "budget_leases",
    metadata,
    Column("account", String(700), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("gateway", String(128), primary_key=True),
    Column("amount", BigInteger, nullable=False),
    Column("used", BigInteger, nullable=False),
    Column("needed", BigInteger, nullable=False),
    Column("wanted", BigInteger, nullable=False),
    Column("fallback", BigInteger, nullable=False),
    Column("target", BigInteger),
    Column("told_at", Utc(), nullable=False),
    Column("until", Utc(), nullable=False),
    Column("fallback_until", Utc(), nullable=False),
    Index("ix_budget_leases_gateway", "gateway"),
)

lease_rounds = Table(
    "lease_rounds",
    metadata,
    Column("gateway", String(128), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("seen_at", Utc(), nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("uid", String(64), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("namespace", String(253), nullable=False),
    Column("name", String(253), nullable=False),
    Column("tenant", String(253), nullable=False),
    Column("requester", String(253), nullable=False),
    Column("phase", String(32), nullable=False),
    Column("reason", String(128), nullable=False),
    Column("message", Text, nullable=False),
    Column("pool", String(253), nullable=False),
    Column("mode", String(64), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("preemptions", Integer, nullable=False),
    Column("restarts", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("lost_steps", BigInteger, nullable=False),
    Column("lost_seconds", Float, nullable=False),
    Column("accelerator_seconds", Float, nullable=False),
    Column("work_units", Float, nullable=False),
    Column("energy_joules", Float, nullable=False),
    Column("cost", Float, nullable=False),
    Column("caused_seconds", Float, nullable=False),
    Column("caused_cost", Float, nullable=False),
    Column("created_at", Utc(), nullable=False),
    Column("started_at", Utc()),
    Column("completed_at", Utc()),
    Column("deleted_at", Utc()),
    Column("seen_at", Utc(), nullable=False),
    Index("ix_jobs_tenant_created_at", "tenant", "created_at"),
    Index("ix_jobs_namespace_name", "namespace", "name"),
)

compute = Table(
    "compute",
    metadata,
    Column("uid", String(64), ForeignKey("jobs.uid", ondelete="CASCADE"), primary_key=True),
    Column("at", Utc(), primary_key=True),
    Column("accelerator_seconds", Float, nullable=False),
    Column("work_units", Float, nullable=False),
    Column("energy_joules", Float, nullable=False),
    Column("cost", Float, nullable=False),
    Column("lost_seconds", Float, nullable=False),
    Column("caused_seconds", Float, nullable=False),
    Column("caused_cost", Float, nullable=False),
)

samples = Table(
    "samples",
    metadata,
    Column("id", big_id(), primary_key=True, autoincrement=True),
    Column("uid", String(64), ForeignKey("jobs.uid", ondelete="CASCADE"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("at", Utc(), nullable=False),
    Column("loss", Float),
    Column("tokens_per_second", Float),
    Column("ready_replicas", Integer),
    Column("mark", BigInteger, nullable=False),
    UniqueConstraint("uid", "attempt", "mark"),
    Index("ix_samples_uid_id", "uid", "id"),
)

files = Table(
    "files",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant", String(253), nullable=False),
    Column("subject", String(253), nullable=False),
    Column("name", String(255), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("parts", Integer, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("batch_id", String(40)),
    Column("created_at", Utc(), nullable=False),
    Index("ix_files_tenant_subject", "tenant", "subject"),
)

file_parts = Table(
    "file_parts",
    metadata,
    Column("file_id", String(40), ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant", String(253), nullable=False),
    Column("subject", String(253), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(40), nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("problem", Text),
    Column("metadata", Text, nullable=False),
    Column("parsed_bytes", BigInteger, nullable=False),
    Column("parsed", Boolean, nullable=False),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("output_file_id", String(40)),
    Column("error_file_id", String(40)),
    Column("created_at", Utc(), nullable=False),
    Column("ended_at", Utc()),
    Index("ix_batches_tenant_subject", "tenant", "subject"),
)

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", String(40), ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("state", String(16), nullable=False),
    Column("custom_id", String(512)),
    Column("head", String(16)),
    Column("turn", Integer, nullable=False, server_default="0"),
    Column("body", Text),
    Column("answer", Text),
    Column("charged", Boolean, nullable=False),
    Column("holder", String(253)),
    Column("process", String(64)),
    Column("until", Utc()),
    Index("ix_batch_lines_batch_id_state_number", "batch_id", "state", "number"),
    Index("ix_batch_lines_batch_id_state_turn", "batch_id", "state", "turn", "number"),
    Index("ix_batch_lines_batch_id_custom_id", "batch_id", "custom_id"),
    Index("ix_batch_lines_batch_id_head", "batch_id", "head"),
    Index("ix_batch_lines_holder", "holder"),
    Index(
        "ix_batch_lines_lent",
        "batch_id",
        sqlite_where=text("holder IS NOT NULL"),
        postgresql_where=text("holder IS NOT NULL"),
    ),
)
