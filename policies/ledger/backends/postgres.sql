-- A ledger in one schema. policies/ledger/backends/postgres.py fills in the schema's and the writer's quoted names, and runs all of it
-- as one transaction. Running it again renews functions, triggers and grants, and leaves the rows alone.

CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {schema}.entry(seq bigint PRIMARY KEY CHECK (seq >= 0), body bytea NOT NULL);
CREATE TABLE IF NOT EXISTS {schema}.envelope(digest bytea PRIMARY KEY, body bytea NOT NULL,
  CHECK (digest = sha256(body)));
CREATE TABLE IF NOT EXISTS {schema}.head(one boolean PRIMARY KEY CHECK (one), term bigint NOT NULL,
  size bigint NOT NULL, root bytea NOT NULL, seal bytea NOT NULL);
INSERT INTO {schema}.head VALUES(true, 0, 0, '', '') ON CONFLICT DO NOTHING;
-- Which form this is: see policies/ledger/backends/schema_version.py.
CREATE TABLE IF NOT EXISTS {schema}.form(version_num varchar(32) NOT NULL,
  CONSTRAINT form_pkc PRIMARY KEY (version_num));
INSERT INTO {schema}.form VALUES({form}) ON CONFLICT DO NOTHING;

CREATE OR REPLACE FUNCTION {schema}.lazaret_kept() RETURNS trigger
  LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
  RAISE EXCEPTION 'append-only';
END $$;
CREATE OR REPLACE FUNCTION {schema}.lazaret_onward() RETURNS trigger
  LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
  IF (NEW.size >= OLD.size AND NEW.term >= OLD.term) IS NOT TRUE THEN RAISE EXCEPTION 'a head only grows'; END IF;
  RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER entry_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON {schema}.entry
  FOR EACH STATEMENT EXECUTE FUNCTION {schema}.lazaret_kept();
CREATE OR REPLACE TRIGGER envelope_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON {schema}.envelope
  FOR EACH STATEMENT EXECUTE FUNCTION {schema}.lazaret_kept();
CREATE OR REPLACE TRIGGER head_is_kept BEFORE DELETE OR TRUNCATE ON {schema}.head
  FOR EACH STATEMENT EXECUTE FUNCTION {schema}.lazaret_kept();
CREATE OR REPLACE TRIGGER head_grows BEFORE UPDATE ON {schema}.head
  FOR EACH ROW EXECUTE FUNCTION {schema}.lazaret_onward();

-- Settings can change while the server runs, so every commit looks again.
CREATE OR REPLACE FUNCTION {schema}.lazaret_durable() RETURNS void
  LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
  IF current_setting('fsync') <> 'on' OR current_setting('full_page_writes') <> 'on'
     OR current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
    RAISE EXCEPTION 'a commit would not be durable' USING ERRCODE = 'LZ002';
  END IF;
END $$;
-- Begin a new term: whoever opened the ledger before can no longer commit. That it writes makes it wait, as a commit
-- does, for the synchronous standbys to have everything before it.
CREATE OR REPLACE FUNCTION {schema}.lazaret_open(OUT term bigint, OUT size bigint, OUT root bytea, OUT seal bytea)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, {schema}, pg_temp AS $$
#variable_conflict use_column
BEGIN
  PERFORM lazaret_durable();
  UPDATE head SET term = term + 1 RETURNING head.term, head.size, head.root, head.seal
    INTO STRICT lazaret_open.term, lazaret_open.size, lazaret_open.root, lazaret_open.seal;
END $$;
-- All of a batch or nothing, and only onto the head that the caller knows, in the caller's own term.
CREATE OR REPLACE FUNCTION {schema}.lazaret_commit(in_term bigint, first bigint, old_root bytea, old_seal bytea,
    bodies bytea[], envelopes bytea[], new_root bytea, new_seal bytea) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, {schema}, pg_temp AS $$
DECLARE
  now_at head%ROWTYPE;
BEGIN
  PERFORM lazaret_durable();
  SELECT * INTO STRICT now_at FROM head FOR UPDATE;
  IF (now_at.term, now_at.size, now_at.root, now_at.seal) IS DISTINCT FROM (in_term, first, old_root, old_seal) THEN
    RAISE EXCEPTION 'another writer has the ledger' USING ERRCODE = 'LZ001';
  END IF;
  INSERT INTO envelope SELECT sha256(e), e FROM unnest(envelopes) AS e ON CONFLICT DO NOTHING;
  INSERT INTO entry SELECT first + n - 1, e FROM unnest(bodies) WITH ORDINALITY AS given(e, n);
  UPDATE head SET size = first + cardinality(bodies), root = new_root, seal = new_seal;
END $$;

-- The writer reads and calls two functions; whatever default privileges had given it or PUBLIC is taken back.
REVOKE ALL ON SCHEMA {schema} FROM PUBLIC, {writer};
REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM PUBLIC, {writer};
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC, {writer};
GRANT USAGE ON SCHEMA {schema} TO {writer};
GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {writer};
GRANT EXECUTE ON FUNCTION {schema}.lazaret_open, {schema}.lazaret_commit TO {writer};
