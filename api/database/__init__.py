"""The database: engine, tables, column types, migrations."""
