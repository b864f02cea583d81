{{/* Where Redis is, and which Secret says so. */}}

{{- define "naru.redis.check" -}}
{{- $external := .Values.redis.external -}}
{{- if .Values.redis.enabled -}}
{{- if or $external.url $external.existingSecret -}}
{{- fail "redis.external is set while redis.enabled is true: set redis.enabled=false to use another Redis" -}}
{{- end -}}
{{- if and .Values.redis.auth.password .Values.redis.auth.existingSecret -}}
{{- fail "redis.auth.password and redis.auth.existingSecret exclude each other: leave one out" -}}
{{- end -}}
{{- else if and $external.url $external.existingSecret -}}
{{- fail "redis.external.url and redis.external.existingSecret exclude each other: leave one out" -}}
{{- else if not (or $external.url $external.existingSecret) -}}
{{- fail "redis.enabled is false and there is no other Redis: set redis.external.existingSecret or redis.external.url" -}}
{{- else if $external.url -}}
{{- if not (regexMatch "^rediss?://" $external.url) -}}
{{- fail "redis.external.url must begin with redis:// or rediss://" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "naru.redis.host" -}}
{{ include "naru.fullname" . }}-redis.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{/* Secret with the key `url`, of one name in all namespaces. */}}
{{- define "naru.redis.secretName" -}}
{{- $given := ternary .Values.redis.auth.existingSecret .Values.redis.external.existingSecret .Values.redis.enabled -}}
{{- $given | default (printf "%s-redis" (include "naru.fullname" .)) -}}
{{- end -}}

{{/* The URL, where the values tell it; else empty. */}}
{{- define "naru.redis.url" -}}
{{- if not .Values.redis.enabled -}}
{{- .Values.redis.external.url -}}
{{- else if .Values.redis.auth.password -}}
redis://:{{ .Values.redis.auth.password | urlquery | replace "+" "%20" }}@{{ include "naru.redis.host" . }}:6379/0
{{- end -}}
{{- end -}}

{{/* Whether the password is made in the cluster: a random one made here would differ in each rendering. */}}
{{- define "naru.redis.isGenerated" -}}
{{- if and .Values.redis.enabled (not .Values.redis.auth.password) (not .Values.redis.auth.existingSecret) -}}true{{- end -}}
{{- end -}}

{{/*
Changes when the Secret does, so that pods start anew. Annotations are read by many: a URL from the values goes through
a slow key derivation, of a Secret that somebody else keeps only its version is told.
*/}}
{{- define "naru.redis.checksum" -}}
{{- $name := include "naru.redis.secretName" . -}}
{{- $url := include "naru.redis.url" . -}}
{{- if $url -}}
{{- derivePassword 1 "maximum" $url .Release.Namespace $name | sha256sum -}}
{{- else if include "naru.redis.isGenerated" . -}}
{{- printf "%s/%s" $name (include "naru.scalar" .Values.redis.auth.rotation) | sha256sum -}}
{{- else -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace $name -}}
{{- $version := "" -}}
{{- with $found }}{{- $version = printf "%s/%s" .metadata.uid .metadata.resourceVersion }}{{- end -}}
{{- printf "%s/%s" $name $version | sha256sum -}}
{{- end -}}
{{- end -}}

{{/* What the Redis pod runs with. */}}
{{- define "naru.redis.files" -}}
redis.conf: |
  dir /data
  port 6379
  # Every entry has one writer that writes it again; none may be thrown out to make room.
  maxmemory-policy noeviction
  {{- if .Values.redis.persistence.enabled }}
  appendonly yes
  {{- else }}
  save ""
  appendonly no
  {{- end }}
  {{- with .Values.redis.config }}
  {{- . | nindent 2 }}
  {{- end }}
  include /run/redis/auth.conf
# The password goes from the Secret into a file in memory: arguments and environments can be listed.
start.sh: |
  set -eu
  umask 077
  password=$(sed 's/[\\"]/\\&/g' /run/secrets/redis/password)
  printf 'requirepass "%s"\n' "$password" > /run/redis/auth.conf
  exec redis-server /etc/redis/redis.conf
ping.sh: |
  REDISCLI_AUTH=$(cat /run/secrets/redis/password) redis-cli -h 127.0.0.1 ping | grep -qx PONG
{{- end -}}
