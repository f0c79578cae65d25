{{/* What every name begins with; short enough for a pod's name to be a host's name: 64 characters. */}}
{{- define "kvbm.fullname" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-kvbm" .Release.Name) (contains "kvbm" .Release.Name)) -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride: %q is no name of an object" $name) -}}
{{- end -}}
{{- $name | replace "." "-" | trunc 39 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvbm.selector" -}}
app.kubernetes.io/name: kvbm
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "kvbm.labels" -}}
{{ include "kvbm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{/* Lists and maps of the values, on one line. JSON is YAML. toYaml writes U+0085 and U+2028 as they
are, and both end a line of YAML. */}}
{{- define "kvbm.json" -}}
{{- toJson . | replace "\u0085" "\\u0085" -}}
{{- end -}}

{{/* Labels beside those of the chart, which stay as they are. */}}
{{- define "kvbm.labelsWith" -}}
{{- merge (include "kvbm.labels" .root | fromYaml) (.more | default dict) | include "kvbm.json" -}}
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
{{- if and .Values.nats.enabled (gt (int $given) (int .Values.nats.replicas)) -}}
{{- fail (printf "nats.streamReplicas is %s, and nats.replicas only %d: a server keeps a stream once" $given (int .Values.nats.replicas)) -}}
{{- end -}}
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

{{/* Megabytes that a host tier needs for tables of blocks: 2048 bytes for each slot, 320 for each block
of disk and bucket. To remember which have left: 300 for each slot, or for each of all up to 201 MB. */}}
{{- define "kvbm.tablesMB" -}}
{{- $tier := .Values.node.hostTier -}}
{{- $blocksPerGB := divf 1000.0 (float64 $tier.blockMB) -}}
{{- $slots := mulf (float64 $tier.cacheGB) $blocksPerGB -}}
{{- $below := mulf (float64 .Values.node.diskTier.cacheGB) $blocksPerGB -}}
{{- if .Values.bucket.enabled -}}
{{- $inBucket := get .Values.settings "DYN_KVBM_OBJECT_NUM_BLOCKS" -}}
{{- $isNumber := or (kindIs "float64" $inBucket) (regexMatch "^[1-9][0-9]*$" (toString $inBucket)) -}}
{{- $below = addf $below (ternary $inBucket 100000 $isNumber | float64) -}}
{{- end -}}
{{- $left := maxf (mulf $slots 0.0003) (minf 201.0 (mulf (addf $slots $below) 0.0003)) -}}
{{- addf (mulf $slots 0.002048) (mulf $below 0.00032) $left -}}
{{- end -}}
