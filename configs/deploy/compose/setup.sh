#!/bin/sh
# Make the secrets of the stack in a directory, each once: tokens, S3 keys, Grafana's password, and a certificate that
# is its own authority. To use others, put them there under the same names before the first start.
set -eu
cd "${1:?usage: setup.sh DIRECTORY}"

new() { [ -s "$1" ] || openssl rand -hex "$2" >"$1"; }
new token 32
new read_token 32
new s3_access_key 10
new s3_secret_key 20
new grafana_password 12
[ -s tls.crt ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=memwal \
    -addext "subjectAltName=DNS:daemon,DNS:run,DNS:localhost" \
    -addext "keyUsage=critical,digitalSignature,keyCertSign" -keyout tls.key -out tls.crt 2>/dev/null

# The containers of the stack run as different users, and only they see this directory. Only memwal reads the key.
chmod 444 token read_token s3_access_key s3_secret_key grafana_password tls.crt
chmod 400 tls.key
[ "$(id -u)" -ne 0 ] || chown 10001 tls.key
