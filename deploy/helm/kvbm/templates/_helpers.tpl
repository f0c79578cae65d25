{{/* What every name begins with; short enough for a pod's name to be a host's name: 64 characters. */}}
{{- define "kvbm.fullname" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-kvbm" .Release.Name) (contains "kvbm" .Release.Name)) -}}
{{- $name | replace "." "-" | trunc 39 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvbm.selector" -}}
app.kubernetes.io/name: kvbm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvbm.labels" -}}
{{ include "kvbm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Arguments of those below: root, and name of an image or a kind of service. */}}
{{- define "kvbm.image" -}}
{{- $image := .root.Values.image -}}
{{- with get $image.digests .name -}}
{{ $image.repository }}/{{ $.name }}@{{ . }}
{{- else -}}
{{ $image.repository }}/{{ .name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The Secret of a role; its name in the values is in camel case. */}}
{{- define "kvbm.secret" -}}
{{- $key := splitList "-" .name | join " " | title | nospace | untitle -}}
{{- get .root.Values.secrets $key | default (printf "%s-%s-creds" (include "kvbm.fullname" .root) .name) -}}
{{- end -}}

{{- define "kvbm.natsUrl" -}}
{{- if .Values.nats.enabled -}}
{{- $name := printf "%s-nats" (include "kvbm.fullname" .) -}}
{{- $urls := list -}}
{{- range $number := until (int .Values.nats.replicas) -}}
{{- $urls = append $urls (printf "tls://%s-%d.%s:4222" $name $number $name) -}}
{{- end -}}
{{- join "," $urls -}}
{{- else -}}
{{- required "nats.url is needed where nats.enabled is false" .Values.nats.url -}}
{{- end -}}
{{- end -}}

{{/* How many servers keep a stream; empty: as it comes. */}}
{{- define "kvbm.streamReplicas" -}}
{{- $given := .Values.nats.streamReplicas | toString -}}
{{- if $given -}}
{{- $given -}}
{{- else if .Values.nats.enabled -}}
{{- ternary 3 1 (ge (int .Values.nats.replicas) 3) -}}
{{- end -}}
{{- end -}}

{{/* A value as a setting takes it: a million is 1000000, not 1e+06. */}}
{{- define "kvbm.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . | toString | quote -}}
{{- else -}}
{{- toString . | quote -}}
{{- end -}}
{{- end -}}
