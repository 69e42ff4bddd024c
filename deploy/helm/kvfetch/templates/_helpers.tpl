{{- define "kvfetch.name" -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvfetch.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvfetch.bytes" -}}
{{- $factors := dict "" 1.0 "k" 1e3 "ki" 1024.0 "m" 1e6 "mi" 1048576.0 "g" 1e9 "gi" 1073741824.0 "t" 1e12 "ti" 1099511627776.0 "p" 1e15 "pi" 1125899906842624.0 -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $factors (regexFind "[A-Za-z]*$" . | lower | trimSuffix "b")) -}}
{{- end -}}

{{- define "kvfetch.labels" -}}
{{ include "kvfetch.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}
