#!/bin/sh
# Run once by PostgreSQL's image, in an empty database: who owns the ledger, and who may only append to it.
set -eu
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
  --set owner="$(cat /run/secrets/owner)" --set writer="$(cat /run/secrets/writer)" <<'EOF'
CREATE ROLE lazaret_owner LOGIN PASSWORD :'owner';
CREATE ROLE lazaret_writer LOGIN PASSWORD :'writer';
REVOKE ALL ON DATABASE lazaret FROM PUBLIC;
GRANT CONNECT, CREATE ON DATABASE lazaret TO lazaret_owner;
GRANT CONNECT ON DATABASE lazaret TO lazaret_writer;
EOF
