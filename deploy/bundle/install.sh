#!/bin/sh
# Install Lazaret from this folder, an unpacked bundle: checked before anything is installed, and without a network.
#
#   ./install.sh --fingerprint "xxxx xxxx xxxx xxxx xxxx xxxx xxxx xxxx"
#
#   --fingerprint F   of the key that signed this bundle, as its publisher told it by another way than the bundle came
#   --prefix DIR      where programs go; /opt/lazaret unless it says otherwise; this version goes to DIR/releases
#   --state DIR       where the services keep what is theirs; /var/lib/lazaret
#   --user NAME       who the services run as; lazaret, who is made where root installs
#   --units DIR       where the service's unit goes; /etc/systemd/system where systemd runs, else it stays in the bundle
#   --container       programs only: no user, no state, no unit
#
# LAZARET_PREFIX, LAZARET_STATE, LAZARET_USER and LAZARET_UNITS say the same where the options are left out.
# Exit 0 installed, 1 refused: nothing was changed, 2 usage. Typed again, it changes nothing. An update is the newer
# bundle's install.sh; the way back is the older one's (`deploy/docs/upgrade.md` says what else an update wants).
set -eu
umask 022
unset PYTHONPATH PYTHONHOME PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS

fingerprint='' container=''
prefix=${LAZARET_PREFIX:-/opt/lazaret} state=${LAZARET_STATE:-/var/lib/lazaret} user=${LAZARET_USER:-lazaret}
units=${LAZARET_UNITS:-}
if [ -z "$units" ] && [ -d /run/systemd/system ]; then units=/etc/systemd/system; fi
usage() { sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
refuse() { echo "refused: $1" >&2; exit 1; }
while [ $# -gt 0 ]; do
  case "$1" in
    --container) container=yes; shift; continue ;;
    --fingerprint | --prefix | --state | --user | --units) [ $# -ge 2 ] || usage ;;
    *) usage ;;
  esac
  case "$1" in
    --fingerprint) fingerprint=$2 ;;
    --prefix) prefix=$2 ;;
    --state) state=$2 ;;
    --user) user=$2 ;;
    --units) units=$2 ;;
  esac
  shift 2
done
for path in "$prefix" "$state" "${units:-/}"; do
  # they stand in a unit and in a shell script: nothing that either would read as more than a name
  case "$path" in /*) ;; *) refuse "$path: say where with a leading /" ;; esac
  case "$path" in *[!A-Za-z0-9/._-]*) refuse "$path: letters, digits and / . _ - only" ;; esac
done
case "$user" in '' | -* | *[!a-z0-9_-]*) refuse "$user is no name of a user" ;; esac
cd "$(dirname "$0")"

# Who signed this, and is it what was signed? Nothing of the bundle is run before both are known.
for tool in openssl sha256sum python3; do
  command -v "$tool" >/dev/null || refuse "$tool is not on this machine: install the system's package (with python3-venv)"
done
[ -n "$fingerprint" ] || refuse "say whose bundle you expect: --fingerprint, as its publisher told you"
expected=$(printf %s "$fingerprint" | tr -d ' :-' | tr A-F a-f)
[ ${#expected} -eq 32 ] || refuse "a fingerprint is eight groups of four"
found=$(openssl pkey -pubin -in release.pub -outform DER 2>/dev/null | sha256sum | cut -c1-32)
[ "$found" = "$expected" ] || refuse "another key signed this bundle; its fingerprint is $(echo "$found" | sed 's/..../& /g')"
openssl pkeyutl -verify -pubin -inkey release.pub -rawin -in SHA256SUMS -sigfile SHA256SUMS.sig >/dev/null 2>&1 ||
  refuse "the signature is not good: SHA256SUMS was changed"
[ -z "$(find . ! -type d ! -type f)" ] || refuse "there is a link here, or something else that is no file: nobody signed that"
# names that nothing below could read as more than a name: a line break in one would make two of it
[ -z "$(LC_ALL=C find . -name '*[!A-Za-z0-9._+-]*')" ] || refuse "a name here has other characters than A-Z a-z 0-9 . _ + -: nobody signed that"
sha256sum --check --strict --quiet SHA256SUMS >&2 || refuse "a file is not what was signed"
listed=$(sed 's/^[0-9a-f]*  //' SHA256SUMS | LC_ALL=C sort)
present=$(find . ! -type d | sed 's,^\./,,' | grep -v -x -F -e SHA256SUMS -e SHA256SUMS.sig | LC_ALL=C sort)
[ "$listed" = "$present" ] || refuse "there is a file here that nobody signed"

field() { sed -n "s/^ *\"$1\": \"\(.*\)\",\{0,1\}\$/\1/p" bundle.json; }
side=$(field side) version=$(field version) python=$(field python) machine=$(field machine)
here=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$here" = "$python" ] || refuse "this bundle is for Python $python, and python3 here is $here: ask for one that fits"
[ "$(uname -m)" = "$machine" ] || refuse "this bundle is for $machine, and this machine is $(uname -m)"
python3 -c 'import ensurepip, venv' 2>/dev/null || refuse "python3-venv is missing: install the system's package"
if [ -n "$container" ]; then units=''; else
  if ! id "$user" >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || refuse "there is no user $user, and only root can make one"
  fi
fi

# The programs: into a folder of their own, which becomes the current one when it is whole.
into=$prefix/releases/$side-$version
if [ -s "$into/.whole" ] && ! cmp -s SHA256SUMS "$into/.whole"; then
  refuse "$side $version is here already, from another bundle; move $into away if this one is to take its place"
fi
if [ ! -s "$into/.whole" ]; then
  mkdir -p "$prefix/releases"
  rm -rf "$into"
  python3 -m venv "$into"
  "$into/bin/python" -m pip uninstall --quiet --yes setuptools  # the system's: what is wanted of it is in the bundle
  # exactly these files by their digests; nothing is looked up, nothing is built
  PIP_CONFIG_FILE=/dev/null "$into/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --only-binary :all: --require-hashes --find-links wheels --requirement requirements.txt
  "$into/bin/python" -m pip --disable-pip-version-check check >&2 || refuse "the packages do not fit together; nothing was put in force"
  "$into/bin/lazaret-$side" --help >/dev/null || refuse "lazaret-$side does not start here; nothing was put in force"
  "$into/bin/python" -m pip uninstall --quiet --yes pip  # no installer stays behind
  cp SHA256SUMS "$into/.whole.next" && mv -f "$into/.whole.next" "$into/.whole"  # which bundle it is from
fi
mkdir -p "$prefix/docs"
cp docs/*.md "$prefix/docs/"
rm -rf "$prefix/docs/site" && cp -R docs/site "$prefix/docs/site"  # the same as pages to click: site/index.html
cp sbom.cdx.json "$prefix/docs/$side-$version.cdx.json"
install -m 755 lazaret-verify.pyz "$prefix/lazaret-verify.pyz"
ln -sfn "releases/$side-$version" "$prefix/.next" && mv -Tf "$prefix/.next" "$prefix/current-$side"
[ -z "$container" ] || { echo "installed $side $version into $prefix"; exit 0; }

# Who it runs as, where its things lie, and the command that hospital IT types.
if ! id "$user" >/dev/null 2>&1; then
  useradd --system --home-dir "$state" --no-create-home --shell /usr/sbin/nologin --comment Lazaret "$user"
fi
if [ ! -d "$state/$side" ]; then
  mkdir -p "$state"
  install -d -m 700 "$state/$side"
  [ "$(id -un)" = "$user" ] || chown "$user:" "$state/$side"
fi
mkdir -p "$prefix/bin"
cat >"$prefix/bin/.next" <<EOF
#!/bin/sh
# lazaret-$side as the service's user and on the service's directory, whoever types it
set -- "$prefix/current-$side/bin/lazaret-$side" --home "$state/$side" "\$@"
[ "\$(id -un)" = "$user" ] || set -- runuser -u "$user" -- "\$@"
exec "\$@"
EOF
chmod 755 "$prefix/bin/.next" && mv -f "$prefix/bin/.next" "$prefix/bin/lazaret-$side"
ln -sfn "$prefix/current-$side/bin/lazaret-verify" "$prefix/bin/lazaret-verify"
if [ -n "$units" ]; then
  mkdir -p "$units"
  sed -e "s,/opt/lazaret,$prefix,g" -e "s,/var/lib/lazaret,$state,g" \
    -e "s,^User=lazaret\$,User=$user," -e "s,^Group=lazaret\$,Group=$(id -gn "$user")," \
    "systemd/lazaret-$side.service" >"$units/.lazaret.next"
  mv -f "$units/.lazaret.next" "$units/lazaret-$side.service"
  [ ! -d /run/systemd/system ] || systemctl daemon-reload
fi
echo "installed $side $version into $prefix; go on with docs/install.md, or open $prefix/docs/site/index.html"
